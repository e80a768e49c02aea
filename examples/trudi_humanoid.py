"""TruDi on Gymnasium's MuJoCo tasks (arXiv 2606.15260).

    python examples/trudi_humanoid.py
    python examples/trudi_humanoid.py task=halfcheetah seed=3 collector.total_frames=400_000
    python examples/trudi_humanoid.py policy=gaussian objective=surrogate trust_region.mode=none
    python examples/trudi_humanoid.py task=halfcheetah arm=reppo
    torchrun --nproc-per-node=2 examples/trudi_humanoid.py

Every option: ``python examples/trudi_humanoid.py --help``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from torchrl_trudi.trainers import (
    ConfigError,
    TrainConfig,
    check_overrides,
    exit_on_config_error,
    make_run_dir,
    register_configs,
    resumed_config,
    validate,
)

CONFIG_DIR = Path(__file__).parent / "config"
log = logging.getLogger(__name__)


def summarize(rollout, metrics, num_minibatches: int, ranks) -> dict[str, float]:
    """Means over the updates of an iteration, and over the episodes that ended in its rollout."""
    import torch

    metrics = ranks.reduce_metrics(metrics)
    # Steps that were skipped, episodes that a fault ended and the targets there mean nothing.
    made = metrics.get("skipped") + metrics.get("skipped_critic") == 0
    means = metrics.exclude("skipped", "skipped_critic")[made].mean(0)
    means["kl_last_epoch"] = metrics.get("kl")[-num_minibatches:][made[-num_minibatches:]].mean()
    done, target = rollout.get(("next", "done")), rollout.get("value_target")
    quarantined = rollout.get(("next", "quarantined"), None)
    if quarantined is not None:
        done, target = done & ~quarantined, target[~quarantined]
        means["quarantined"] = ranks.sum(quarantined.sum())
    episodes = ranks.sum(done.sum())
    count = target.new_tensor(target.numel())
    means["value_target"] = ranks.sum(target.sum()) / ranks.sum(count)
    for name, key in (("return", "episode_reward"), ("length", "step_count")):
        # 0 / 0 = NaN if no episode ended.
        means[name] = ranks.sum((rollout.get(("next", key)) * done).sum()) / episodes
    if "unstable" in rollout:  # MujocoBatchEnv: simulations that diverged
        means["unstable"] = ranks.sum(rollout.get(("next", "unstable")).sum())
    for field, draws in rollout.get("randomization", {}).items():
        means[f"randomization_{field}"] = ranks.mean(draws.mean())
    names, values = [], []
    for name, value in means.items():
        names += [f"{name}/{i}" for i in range(value.numel())] if value.ndim else [name]
        values.append(value.reshape(-1).float())
    return {f"train/{n}": v for n, v in zip(names, torch.cat(values).tolist(), strict=True)}


def train(config: TrainConfig) -> Path:
    """Train and return the run directory."""
    from torchrl_trudi.trainers.distributed import Ranks

    # One process, or those that torchrun started, each of which goes through all that follows.
    with Ranks(config.device, timeout_s=config.distributed.timeout_s) as ranks:
        return train_rank(config, ranks)


def train_rank(config: TrainConfig, ranks) -> Path:
    """What one process does of a run: all of it, if it is the only one."""
    # Imported here, so that --help and a misspelt option answer at once.
    import torch
    from torchrl.checkpoint import GlobalRNGState
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
    from torchrl.envs import ExplorationType
    from tqdm import tqdm

    from torchrl_trudi.envs import available_cpus, get_observation_norm
    from torchrl_trudi.objectives import cut_at_quarantined, replace_quarantined, surrogate_gap
    from torchrl_trudi.record import ScalarWriter, evaluate, plot_learning_curve
    from torchrl_trudi.trainers.builders import (
        build_actor,
        build_buffer_transform,
        build_critic,
        build_env,
        build_loss,
        build_lr_schedule,
        build_update,
    )
    from torchrl_trudi.trainers.checkpoints import RunCheckpoints
    from torchrl_trudi.trainers.collector_state import CollectorState
    from torchrl_trudi.trainers.rank_share import share_of
    from torchrl_trudi.trainers.rank_states import RankStates
    from torchrl_trudi.trainers.run_dir import lock_run, record_resume, run_id
    from torchrl_trudi.trainers.shared_statistics import SharedStatistics
    from torchrl_trudi.trainers.skips import SkipMonitor
    from torchrl_trudi.trainers.stop_request import StopRequest
    from torchrl_trudi.trainers.task_interface import TaskInterface
    from torchrl_trudi.trainers.update import keep_settings

    device = ranks.device
    # This process's part of environments, frames and minibatches, and its own seed.
    share = share_of(config, ranks)
    # PyTorch counts the host's CPUs, of which a container may have a few.
    torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), available_cpus()))
    torch.manual_seed(share.seed)

    # The parts. Nothing is written before all of them could be built.
    env = build_env(share)
    norm = get_observation_norm(env) if config.env.normalize_observation else None
    statistics = SharedStatistics(norm, ranks)
    eval_env = build_env(
        config,
        num_envs=max(1, config.logger.eval_episodes),
        seed=config.seed + 1_000_000,
        observation_norm=norm,
    )
    actor = build_actor(config, env, device)
    critic = build_critic(config, env, device)
    loss = build_loss(config, actor, critic)
    ranks.broadcast([*loss.parameters(), *loss.buffers()])
    update = build_update(config, loss, ranks)
    lr_schedule = build_lr_schedule(config, update)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(share.collector.frames_per_batch, device=device),
        sampler=SamplerWithoutReplacement(),
        batch_size=share.collector.frames_per_batch // config.optim.num_minibatches,
        transform=build_buffer_transform(config),
    )
    progress: dict[str, Any] = {"frames": 0, "iterations": 0, "seconds": 0.0}
    components: dict[str, Any] = {
        "loss": loss,
        "optim_actor": update.optim_actor,
        "optim_critic": update.optim_critic,
    }
    if norm is not None:
        components["observation_norm"] = norm
    collector = Collector(
        env,
        actor,
        frames_per_batch=share.collector.frames_per_batch,
        total_frames=-1,
        policy_device=device,
        env_device="cpu",
        storing_device=device,
        exploration_type=ExplorationType.RANDOM,
        track_traj_ids=False,  # nothing here reads them
        # The policy has no state between steps that a transform would have to reset.
        auto_register_policy_transforms=False,
    )
    place = CollectorState(collector, env)
    states = RankStates(ranks, {"collector": place, "rng": GlobalRNGState()})
    components |= {"progress": progress, **states.components()}

    # A new directory, or that of the run to be continued.
    run_dir = ranks.on_main(lambda: make_run_dir(config.logger.dir, config, config.resume))
    with contextlib.ExitStack() as stack:
        stack.callback(collector.shutdown)
        ranks.on_main(lambda: stack.enter_context(lock_run(run_dir)))
        checkpoints = RunCheckpoints(
            run_dir / "checkpoints",
            components,
            keep_last=config.logger.keep_checkpoints,
            num_ranks=ranks.world_size,
            run_id=run_id(run_dir),
            task=TaskInterface.of(env, actor.observation_keys),
        )
        if config.resume is not None:
            optims = (update.optim_actor, update.optim_critic)
            with keep_settings(*optims, states={"lr"} if lr_schedule else ()):
                checkpoints.load(map_location=device)
            statistics.restart()
            if progress["frames"] >= config.collector.total_frames:
                raise ConfigError(
                    f"resume: {run_dir} has {progress['frames']} frames already; ask for more "
                    "with collector.total_frames"
                )
            ranks.on_main(lambda: record_resume(run_dir, config))
            if not place.restored:
                # Otherwise every resumed run would begin with the same episodes as the first.
                env.set_seed(share.seed + progress["frames"])
                collector.reset()
                if not ranks.is_main:  # whose random numbers went on
                    torch.manual_seed(share.seed + progress["frames"])
        if ranks.is_main:
            resume_from = progress["frames"] if config.resume else None
            writer = ScalarWriter(run_dir, resume_from=resume_from)
            stack.callback(writer.close)
        stack.callback(lambda: eval_env.is_closed or eval_env.close())
        bar = stack.enter_context(
            tqdm(
                total=config.collector.total_frames,
                initial=progress["frames"],
                unit="frame",
                disable=not (config.logger.progress and ranks.is_main),
            )
        )
        stop = stack.enter_context(StopRequest())

        def log_evaluation() -> dict[str, float]:
            scalars = {}
            for name in ("deterministic", "stochastic"):
                # Its own random numbers, the same each time: training does not depend on how often
                # it is evaluated, and evaluations differ by the policy alone.
                with torch.random.fork_rng():
                    torch.manual_seed(config.seed)
                    result = evaluate(
                        eval_env,
                        actor,
                        config.logger.eval_episodes,
                        exploration_type=ExplorationType[
                            "DETERMINISTIC" if name == "deterministic" else "RANDOM"
                        ],
                        seed=config.seed + 1_000_000,
                        policy_device=device,
                    )
                scalars[f"eval/return_{name}"] = result.mean
                scalars[f"eval/return_{name}_std"] = result.std
                scalars[f"eval/length_{name}"] = result.length_mean
            if config.objective.elbo_coeff > 0:
                # On fresh chains of the policy as it is now, at some states of this iteration.
                rows = torch.linspace(0, data.numel() - 1, min(256, data.numel())).long()
                some = data.select(*actor.observation_keys).reshape(-1)[rows.to(device)]
                with torch.random.fork_rng():
                    torch.manual_seed(config.seed)
                    gap = surrogate_gap(actor, some).gap
                scalars["eval/surrogate_gap"] = gap.mean().item()
            writer.write(progress["frames"], scalars)
            return scalars

        saved = progress["frames"]

        def save(value: float | None = None, *, last: bool = False) -> None:
            nonlocal saved
            if not ranks.is_main:
                return
            try:
                checkpoints.save(progress["frames"], config, value=value)
                saved = progress["frames"]
            except OSError as error:
                if last:
                    raise ConfigError(
                        f"{run_dir}: the last checkpoint could not be written ({error}); the newest one "
                        f"before it is {checkpoints.latest()}"
                    ) from error
                # Not the end of the run: the checkpoints before it are whole.
                log.error("checkpoint at %d frames failed: %s", progress["frames"], error)

        def due(interval: int) -> bool:
            """Whether this iteration passed a multiple of the interval."""
            frames, batch = progress["frames"], config.collector.frames_per_batch
            return frames // interval > (frames - batch) // interval

        train_return, evaluation = float("nan"), {}
        factor = config.trust_region.stop_factor
        stop_kl = None if factor is None else factor * config.trust_region.eps
        skips = SkipMonitor(config.optim.max_consecutive_skips)
        skips.streak = progress.get("skipped_in_a_row", 0)
        batches = iter(collector)
        stopping = False
        while progress["frames"] < config.collector.total_frames and not stopping:
            start = time.perf_counter()
            data = next(batches)
            statistics.merge()
            collected = time.perf_counter()

            # Targets of the whole rollout, then minibatches of single transitions.
            # Before the old policy is updated, since the targets are those of the policy that acted.
            rollout = cut_at_quarantined(data)
            loss.value_estimator(rollout)
            data["value_target"] = rollout["value_target"]
            marked = [("next", "quarantined")] if "quarantined" in data["next"] else []
            loss.update_old_policy()
            buffer.empty()
            buffer.extend(
                replace_quarantined(rollout.select(*loss.minibatch_keys, *marked).reshape(-1))
            )

            metrics: list[Any] = []
            stopped = False
            for _ in range(config.optim.num_epochs):
                for batch in buffer:
                    step = update.step_critic(batch) if stopped else update(batch)
                    skips.observe(batch, step)
                    if not stopped:
                        metrics.append(step)
                if stop_kl is not None and not stopped:
                    epoch = metrics[-config.optim.num_minibatches :]
                    kl = torch.stack([each["kl"] for each in epoch]).nanmean()
                    stopped = bool(ranks.mean(kl) > stop_kl)

            # All scalars of the iteration, in one transfer from the device.
            scalars = summarize(data, torch.stack(metrics), config.optim.num_minibatches, ranks)
            if math.isfinite(scalars["train/return"]):
                train_return = scalars["train/return"]
            else:  # no episode ended
                del scalars["train/return"], scalars["train/length"]
            seconds = time.perf_counter() - start
            frames = ranks.world_size * data.numel()
            progress["frames"] += frames
            progress["iterations"] += 1
            progress["seconds"] += seconds
            scalars.update({f"train/{k}": v for k, v in skips.end_iteration().items()})
            progress["skipped_in_a_row"] = skips.streak
            scalars["train/kl_bound"] = config.trust_region.eps
            if stop_kl is not None:
                scalars["train/actor_updates"] = len(metrics)
            if lr_schedule is not None:
                if math.isfinite(scalars["train/kl_last_epoch"]):  # else no step was made
                    lr_schedule.step(scalars["train/kl_last_epoch"])
                (scalars["train/lr"],) = lr_schedule.get_last_lr()
            scalars["time/seconds"] = progress["seconds"]
            scalars["time/frames_per_second"] = frames / seconds
            scalars["time/collection_fraction"] = (collected - start) / seconds
            try:
                if ranks.is_main:
                    writer.write(progress["frames"], scalars)
            except OSError as error:
                save()  # where the checkpoints are there may still be room
                raise ConfigError(
                    f"{run_dir}: the log cannot be written ({error}); the newest checkpoint is "
                    f"{checkpoints.latest()}"
                ) from error
            if skips.exceeded:
                states.gather()
                if ranks.is_main:
                    skips.write_report(run_dir / "skipped_batch.json", frames=progress["frames"])
                save()
                raise FloatingPointError(
                    f"{skips.max_consecutive} minibatches in a row have a loss or gradient that is not "
                    f"finite, at {progress['frames']} frames: see skipped_batch.json in {run_dir}. The "
                    "parameters from before are in its checkpoint."
                )
            bar.update(frames)
            bar.set_postfix(
                ret=f"{train_return:.0f}", kl=f"{scalars['train/kl']:.3f}", refresh=False
            )

            finished = progress["frames"] >= config.collector.total_frames
            value = None
            evaluates = config.logger.eval_episodes and (
                finished or due(config.logger.eval_interval)
            )
            if evaluates and ranks.is_main:
                evaluation = log_evaluation()
                value = evaluation["eval/return_deterministic"]
            stopping = ranks.any(bool(stop))
            if finished or stopping or due(config.logger.checkpoint_interval):
                states.gather()
                save(value)
        if saved < progress["frames"]:  # told to stop, or it failed
            save(last=True)

    if not ranks.is_main:
        return run_dir
    curve: Path | str = run_dir / "learning_curve.png"
    try:
        plot_learning_curve(run_dir, curve, title=config.env.name)
    except ValueError as error:  # a run so short that no episode ended
        curve = f"none ({error})"
    lines = {
        "task": f"{config.env.name}, seed {config.seed}",
        "frames": f"{progress['frames']:,} in {progress['seconds'] / 60:.1f} min",
        "training return": f"{train_return:.1f}",
        **{
            f"{name} return": f"{evaluation[key]:.1f} +- {evaluation[f'{key}_std']:.1f}"
            for name in ("deterministic", "stochastic")
            if (key := f"eval/return_{name}") in evaluation
        },
        "run": run_dir,
        "learning curve": curve,
    }
    if stop.signal is not None:
        lines["stopped"] = f"by {stop.signal.name}; resume={run_dir} goes on"
    elif stopping:
        lines["stopped"] = f"by a signal to another process; resume={run_dir} goes on"
    print("\n".join(f"{name:>20}: {value}" for name, value in lines.items()))
    return run_dir


@hydra.main(version_base=None, config_path="config", config_name="trudi_humanoid")
def main(config: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with exit_on_config_error():
        if config.resume is not None:
            # The run's own settings, and what this call changes.
            overrides = HydraConfig.get().overrides.task
            _, config = resumed_config(config.resume, config.logger.dir, overrides)
        train(validate(config))


if __name__ == "__main__":
    register_configs()
    check_overrides(sys.argv[1:], config_dir=CONFIG_DIR)
    main()
