from __future__ import annotations

import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from torchrl_trudi.trainers.config import ConfigError, TrainConfig, register_configs, validate
from torchrl_trudi.trainers.overrides import check_overrides, exit_on_config_error, find_problems

CONFIG_DIR = Path(__file__).parents[2] / "examples" / "config"
PRESETS = sorted(path.stem for path in (CONFIG_DIR / "task").glob("*.yaml"))


def problems(*argv):
    return find_problems(argv, TrainConfig, CONFIG_DIR)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command line as the example script does; returns the configurations it got."""
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    register_configs()

    def run(*argv):
        got = []
        monkeypatch.setattr(sys, "argv", ["script.py", *argv])
        check_overrides(sys.argv[1:], config_dir=CONFIG_DIR)
        main = hydra.main(
            version_base="1.3", config_path=str(CONFIG_DIR), config_name="trudi_humanoid"
        )(got.append)
        main()
        return [validate(config) for config in got]

    yield run
    GlobalHydra.instance().clear()


GOOD = [
    "env.name=HalfCheetah-v5",
    "collector.total_frames=400_000",
    "optim.lr=1.0e-4",
    "optim.lr=1",
    "optim.dual_lr=null",
    "resume=null",
    "seed=3",
    "task=hopper",
    "task=hopper.yaml",
    "policy.learn_prior=yes",
    "critic={hidden_size: 4}",
    "policy=gaussian",
    "objective=surrogate",
    "policy=diffusion,gaussian",
    "logger.dir=runs/x",
    "logger.dir=${env.name}",
    "seed=${env.num_envs}",
    "+env.kwargs.foo=1",
    "+env.kwargs={foo: 1}",
    "++seed=4",
    "+anything=3",
    "~task",
    "~anything",
    "hydra.verbose=true",
    "hydra/job_logging=stdout",
    "seed=1,2,3",
    "seed=range(3)",
    "task=hopper,ant",
    "task=glob(*)",
    "trust_region.eps=0.1,0.2",
    "trust_region.kl='full',simplified",
]


@pytest.mark.parametrize("word", GOOD)
def test_good_overrides_pass(word):
    assert problems(word) == []


BAD = {
    "env.nmae=Hopper-v5": "unknown option 'env.nmae', did you mean 'env.name'?",
    "polciy.num_steps=4": "unknown option 'polciy.num_steps', did you mean 'policy.num_steps'?",
    "num_steps=4": "did you mean 'policy.num_steps'?",
    "tsak=hopper": "did you mean 'task'?",
    "zzz=1": "unknown option 'zzz', accepted: arm, task, policy, objective, seed, device",
    "task=humanoidd": "task: unknown preset 'humanoidd', did you mean 'humanoid'?",
    "task=hopper,antt": "unknown preset 'antt', did you mean 'ant'?",
    "seed=abc": "seed: got 'abc', accepted: an integer (int)",
    "seed=null": "seed: got None, accepted: an integer",
    "seed=1,two": "seed: got 'two', accepted: an integer",
    "++seed=abc": "seed: got 'abc', accepted: an integer",
    "collector.total_frames=1e6": "accepted: an integer (int), >= 1 (write 1000000)",
    "optim.lr=fast": "optim.lr: got 'fast', accepted: a number (float)",
    "optim.lr=-1": "optim.lr: got -1.0, accepted: > 0",
    "policy.learn_prior=perhaps": "accepted: true or false (bool)",
    "trust_region.mode=swich": "trust_region.mode: got 'swich' (did you mean 'switch'?)",
    "trust_region.kl='ful'": "trust_region.kl: got 'ful'",
    "critic=4": "critic: got 4, but it is a section; set one of its options, such as critic.kind",
    "critic={vmni: 4}": "unknown option 'critic.vmni', did you mean 'critic.vmin'?",
    "critic={num_bins: x}": "critic.num_bins: got 'x', accepted: an integer",
    "policy=4": "policy: got 4, accepted: diffusion, gaussian; set its options one by one, policy.OPT",
    "policy={num_steps: 4}": "accepted: diffusion, gaussian; set its options one by one",
    "policy=gausian": "policy: unknown preset 'gausian', did you mean 'gaussian'?",
    "objective=ppo": "objective: unknown preset 'ppo' (accepted: pathwise, surrogate)",
    "env.kwargs.foo=1": "env.kwargs.foo: not set yet, add it with +env.kwargs.foo=1",
    "env.kwargs={foo: 1}": "env.kwargs: add its entries with +env.kwargs={foo: 1}",
    "env.kwargs=3": "env.kwargs: got 3, accepted: a mapping",
    "humanoid": "cannot read 'humanoid', accepted: OPTION=VALUE",
    "seed=[": "cannot read 'seed=[', accepted: OPTION=VALUE",
}


@pytest.mark.parametrize(("word", "message"), BAD.items())
def test_bad_overrides_are_one_specific_line(word, message):
    (line,) = problems(word)
    assert message in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--cfg", "job"],
        ["-c", "job", "seed=1"],
        ["--info"],
        ["--info", "seed=1"],
        ["--info", "defaults"],
        ["--multirun", "seed=1,2"],
        ["-m"],
        ["--cfg", "job", "--package", "env"],
        ["--config-name", "other", "unknown=1"],
        ["--config-dir=x", "unknown=1"],
        ["--hydra-help"],
    ],
)
def test_flags_of_hydra_pass(argv):
    assert problems(*argv) == []


@pytest.mark.parametrize("flag", [["--info"], ["--cfg", "job"], ["--multirun"]])
def test_overrides_after_flags_are_checked(flag):
    assert len(problems(*flag, "sede=1")) == 1


def test_exit_code_and_stderr(capsys):
    with pytest.raises(SystemExit) as error:
        check_overrides(["seed=1", "sede=1", "seed=x"], TrainConfig, CONFIG_DIR, prog="train")
    assert error.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "train: error: unknown option 'sede', did you mean 'seed'?\n"
        "train: error: seed: got 'x', accepted: an integer (int), >= 0\n"
    )


def test_exit_on_config_error(capsys):
    with pytest.raises(SystemExit) as error, exit_on_config_error("train"):
        raise ConfigError("a: wrong\n  b -> c")
    assert error.value.code == 2
    assert capsys.readouterr().err == "train: error: a: wrong\n  b -> c\n"
    with pytest.raises(ZeroDivisionError), exit_on_config_error("train"):
        _ = 1 / 0


def test_command_line_gives_the_configuration(run, tmp_path):
    (config,) = run(
        "env.name=HalfCheetah-v5",
        "collector.total_frames=400_000",
        "seed=3",
        "logger.dir=runs/x",
        "+env.kwargs.forward_reward_weight=2",
    )
    assert config.env.name == "HalfCheetah-v5"
    assert config.collector.total_frames == 400_000
    assert (config.seed, config.logger.dir) == (3, "runs/x")
    assert config.env.kwargs == {"forward_reward_weight": 2}
    # Hydra made no directory of its own.
    assert list(tmp_path.iterdir()) == []


def test_defaults_of_the_command_line_are_those_of_the_schema(run):
    assert run() == [TrainConfig()]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(run, preset):
    (config,) = run(f"task={preset}")
    assert config.env.name.replace("-v5", "").lower() == preset.replace("_", "")


def test_command_line_wins_over_the_preset(run):
    (config,) = run("env.name=Other-v0", "critic.vmax=1000", "task=hopper")
    assert (config.env.name, config.critic.vmax, config.critic.vmin) == ("Other-v0", 1000.0, -10.0)


def test_multirun(run):
    assert [config.seed for config in run("--multirun", "seed=1,2")] == [1, 2]


def test_help_lists_groups_options_and_configuration(run, capsys):
    with pytest.raises(SystemExit) as error:
        run("--help", "task=ant")
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert f"task: {', '.join(PRESETS)}" in text
    assert "trust_region.eps=0.1  (float, > 0)" in text
    assert "name: Ant-v5" in text
    assert "$" not in text


def test_cfg_job_prints_the_configuration(run, capsys):
    assert run("--cfg", "job", "seed=7") == []
    assert "seed: 7" in capsys.readouterr().out
