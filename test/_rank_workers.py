"""What the ranks of the distributed tests do. In a module of its own, so that any process can import it."""

from __future__ import annotations

import torch
import trudi_humanoid
from tensordict import TensorDict
from torch import nn
from torchrl.modules import MLP, ValueOperator

from torchrl_trudi.envs import RunningMeanVar, RunningObservationNorm, get_observation_norm
from torchrl_trudi.modules import (
    DiffusionActor,
    GaussianActor,
    HLGaussCritic,
    HLGaussValueOperator,
)
from torchrl_trudi.objectives import TrajectoryKLProjection, TruDiLoss, TruDiPPOLoss
from torchrl_trudi.trainers import builders, validate
from torchrl_trudi.trainers.distributed import RankError, Ranks
from torchrl_trudi.trainers.shared_statistics import SharedStatistics
from torchrl_trudi.trainers.update import TruDiUpdate


def collectives() -> dict:
    """Every method of the group, with values by which the ranks can be told apart."""
    with Ranks("cpu", timeout_s=60) as ranks:
        r = ranks.rank
        out = {
            "any": [ranks.any(r == 1), ranks.any(False)],
            "all": [ranks.all(r == 1), ranks.all(True)],
        }
        out["sum"] = ranks.sum(torch.tensor(r + 1)).item()
        out["mean"] = ranks.mean(torch.tensor([1.0, r])).tolist()
        metrics = TensorDict(
            {"kl": torch.tensor([r, 2.0]), "kl_max": torch.tensor([r, -r * 1.0])}, [2]
        )
        metrics["per_step"] = torch.full((2, 3), float(r))
        reduced = ranks.reduce_metrics(metrics)
        out["metrics"] = {key: value.tolist() for key, value in reduced.items()}
        tensors = [
            torch.full((2,), r),
            torch.tensor(r == 0),
            torch.arange(6.0).view(2, 3).T * (1 - r),
        ]
        ranks.broadcast(tensors)
        out["broadcast"] = [tensor.tolist() for tensor in tensors]
        out["main"] = ranks.on_main(lambda: f"of {r}")
        try:
            ranks.on_main(lambda: 1 // 0)
        except (RankError, ZeroDivisionError) as error:
            out["error"] = f"{type(error).__name__}: {error}"
        out["gather"] = ranks.gather(r * 10)
        # A gradient everywhere, on one rank, and nowhere.
        params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        params[0].grad = torch.tensor([1.0, r])
        if r == 1:
            params[1].grad = torch.tensor([4.0, 2.0])
        ranks.average_gradients(params)
        out["gradients"] = [None if p.grad is None else p.grad.tolist() for p in params]
    return out


def statistics(offset: float) -> dict:
    """Statistics after several merges, of unequal and of no data, and of all data at once."""
    generator = torch.Generator().manual_seed(7)
    with Ranks("cpu", timeout_s=60) as ranks:
        part, whole = RunningMeanVar((3,)), RunningMeanVar((3,))
        shared = SharedStatistics(RunningObservationNorm({"observation": part}), ranks)
        shared.merge()  # before anything was seen
        rows = []
        for sizes in ((5, 1), (200, 200), (0, 3), (64, 0), (0, 0)):
            data = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]
            data = [offset + (1 + rank) * each for rank, each in enumerate(data)]
            for chunk in data[ranks.rank].split(7):
                part.update(chunk)
            rows += data
            shared.merge()
        whole.update(torch.cat(rows))
    return {
        name: [getattr(each, name).tolist() for each in (part, whole)]
        for name in ("count", "mean", "var")
    }


def make_update(kind: str, ranks: Ranks | None):
    """The same update whenever it is called, and a batch of 64 on which it has much to do."""
    torch.manual_seed(0)
    surrogate = kind.startswith("surrogate")
    record = {"return_chain": True, "return_dist_params": True, "return_path_log_prob": surrogate}
    record["event_dims"] = 2
    if kind == "gaussian":
        actor = GaussianActor(2, 3, return_chain=True, return_dist_params=True)
    else:
        actor = DiffusionActor(2, 3, num_steps=4, learn_prior=True, **record)
    trajectory_kl = TrajectoryKLProjection(actor, eps=0.1)
    if surrogate:
        critic = ValueOperator(MLP(3, 1, num_cells=[16]), in_keys=["observation"])
        loss = TruDiPPOLoss(actor, critic, trajectory_kl=trajectory_kl)
    else:
        critic = HLGaussValueOperator(HLGaussCritic(5, -1.0, 1.0, hidden_size=16))
        loss = TruDiLoss(actor, critic, trajectory_kl=trajectory_kl)
    with torch.no_grad():
        batch = actor(TensorDict({"observation": torch.randn(64, 3)}, [64]))
        for param in loss.actor_parameters():
            param.add_(0.05 * torch.randn_like(param))
        # The first half is inside the bound, and the second beyond: one rank each. There the prior, which
        # the objective alone reads, has no gradient.
        kl = trajectory_kl.path_kl(batch).kl
        batch = batch[kl.argsort()]
        trajectory_kl.eps.copy_(kl.sort().values[31:33].mean())
    batch["value_target"] = torch.randn(64, 1)
    batch["advantage"] = torch.randn(64, 1) + torch.linspace(0, 3, 64).unsqueeze(-1)
    batch["next", "critic", "embedding"] = torch.randn(64, 16)
    together = ranks is not None and ranks.several
    if together and surrogate:
        loss.sum_over_ranks = ranks.sum
    exact = torch.get_default_dtype() == torch.float64
    # Adam turns the last bit of a small gradient into a whole step; only float64 has bits to spare.
    optim = torch.optim.Adam if exact else torch.optim.SGD
    update = TruDiUpdate(
        loss,
        optim(loss.actor_param_groups(lr=1e-2)),
        optim(loss.critic_parameters(), lr=1e-2),
        reduce_gradients=ranks.average_gradients if together else None,
    )
    noise = torch.randn(64, actor.num_steps + 1, 2)
    return update, batch, noise


def one_update(kind: str, dtype: torch.dtype) -> dict:
    """Largest difference of a step on both halves, one a rank, from the step on the whole."""
    torch.set_default_dtype(dtype)
    with Ranks("cpu", timeout_s=60) as ranks:
        states, metrics, deltas = [], [], []
        for group in (ranks, None):
            update, batch, noise = make_update(kind, group)
            if group is not None:
                rows = slice(32 * ranks.rank, 32 * (ranks.rank + 1))
                batch, noise = batch[rows], noise[rows]
            update.loss.actor_network.module.draw_noise = lambda shape, noise=noise: noise
            before = [p.detach().clone() for p in update.loss.parameters()]
            out = update(batch)
            states.append([p.detach().clone() for p in update.loss.parameters()])
            deltas.append(max((a - b).abs().max() for a, b in zip(states[-1], before, strict=True)))
            metrics.append(out if group is None else ranks.reduce_metrics(out))
        gaps = [(a - b).abs().max().item() for a, b in zip(*states, strict=True)]
        means = ("kl", "kl_max", "gate_fraction", "entropy", "loss_critic", "grad_norm")
        return {
            "gap": max(gaps),
            "moved": deltas[1].item(),
            "gate": metrics[1]["gate_fraction"].item(),
            "metrics": max(abs((metrics[0][k] - metrics[1][k]).item()) for k in means),
            "bits": b"".join(state.numpy().tobytes() for state in states[0]),
        }


def train(settings: dict) -> dict:
    """A run by the example: what a rank has in the end, and the observations that it counted."""
    seen, parts = [], {}
    update, build_loss, build_env = RunningMeanVar.update, builders.build_loss, builders.build_env

    def counted(self, x, mask=None):
        seen.append((x if mask is None else x[mask.reshape(-1)]).reshape(-1, x.shape[-1]).clone())
        update(self, x, mask)

    def loss(*args):
        parts["loss"] = build_loss(*args)
        return parts["loss"]

    def env(*args, **kwargs):
        made = build_env(*args, **kwargs)
        parts.setdefault("env", made)
        return made

    RunningMeanVar.update, builders.build_loss, builders.build_env = counted, loss, env
    try:
        run = trudi_humanoid.train(validate(settings))
    finally:
        RunningMeanVar.update, builders.build_loss, builders.build_env = (
            update,
            build_loss,
            build_env,
        )
    tensors = [*parts["loss"].parameters(), *parts["loss"].buffers()]
    norm = get_observation_norm(parts["env"]).get_statistics("observation")
    return {
        "run": str(run),
        "state": b"".join(tensor.detach().numpy().tobytes() for tensor in tensors),
        "duals": [dual.item() for dual in parts["loss"].dual_parameters()],
        "norm": {name: getattr(norm, name).numpy() for name in ("count", "mean", "var")},
        "seen": torch.cat(seen).numpy(),
    }


def misfit(settings: dict) -> str:
    try:
        train(settings)
    except ValueError as error:
        return str(error)
    return ""
