"""Sharded models in the hands of other libraries, against unsharded ones."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import autotp
from autotp import structures
from autotp.comparing import gathered
from autotp.errors import AutotpError
from tests.exact.around_tasks import double, errors_of, held
from tests.exact.compile_tasks import step
from tests.harness.tasks import mesh_of

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def _with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)).double()


def adapters(payload: dict[str, Any]) -> dict[str, Any] | None:
    """peft's LoRA, put in before or after sharding."""
    mesh = mesh_of(2)
    if dist.get_rank() >= 2:
        return None
    model, args, kwargs = double("hf:llama")
    reference = _with_lora(copy.deepcopy(model))
    expected = step(reference, args, kwargs)
    try:
        if payload["before"]:
            model = autotp.shard(_with_lora(model), mesh, sample=(args, kwargs))
        else:
            model = _with_lora(autotp.shard(model, mesh, sample=(args, kwargs)))
        found = step(model, args, kwargs)
    except AutotpError as e:
        return {"refused": str(e)}
    same = [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    return {**errors_of(expected, found), "names": same, "held": held(model)}


# ---------------------------------------------------------------- libraries with a training loop


@contextmanager
def as_launched() -> Iterator[None]:
    """The variables that torchrun gives a process; and accelerators that count as several devices, as GPUs do."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, given))
        stack.enter_context(patch.object(Accelerator, "multi_device", property(lambda self: True)))
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
            stack.callback(state._reset_state)
        yield


class Sentences(Dataset[dict[str, Tensor]]):
    """Token ids and the same as labels."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(2, 128, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def _apart(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((gathered(p.detach()) - q.detach()).abs().max()) for p, q in pairs)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def fabric(folder: str) -> dict[str, Any]:
    """Lightning's Fabric: three steps on two axes, a checkpoint written, lost and read."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    model, args, kwargs = double("hf:llama")
    reference = copy.deepcopy(model)
    strategy: Any = ModelParallelStrategy(
        parallelize_fn=lambda model, mesh: autotp.shard(model, mesh, sample=(args, kwargs)),
        data_parallel_size=2, tensor_parallel_size=2, process_group_backend="gloo",
    )  # fmt: skip
    with as_launched():
        runner = Fabric(accelerator="cpu", devices=4, strategy=strategy)
        runner.launch()
        wrapped = runner.setup_module(model)
        optimizer, expected = runner.setup_optimizers(_adamw(wrapped)), _adamw(reference)
        place, norms = strategy.device_mesh["data_parallel"].get_local_rank(), []
        for step in range(3):
            ids = torch.randint(2, 128, (2, 12), generator=torch.Generator().manual_seed(step))
            reference(input_ids=ids, labels=ids).loss.backward()
            mine = ids.chunk(2)[place]
            runner.backward(wrapped(input_ids=mine, labels=mine).loss)
            whole = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            norms.append(abs(float(gathered(runner.clip_gradients(wrapped, optimizer, max_norm=0.5))) - float(whole)))
            for one in (optimizer, expected):
                one.step()
                one.zero_grad()
        trained = _apart(wrapped, reference)
        runner.save(folder, {"model": wrapped, "optimizer": optimizer})
        with torch.no_grad():
            for p in wrapped.parameters():
                p.zero_()
        runner.load(folder, {"model": wrapped, "optimizer": optimizer})
    return {"trained": trained, "norm": max(norms), "loaded": _apart(wrapped, reference), "held": held(model)}


def lightning_trainer(folder: str) -> dict[str, Any]:
    """Lightning's Trainer on two axes: two clipped steps, its checkpoint, and two more by another Trainer and model."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    mine: list[Tensor] = []

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.args, self.kwargs = double("hf:llama")

        def configure_model(self) -> None:
            if self.args is not None:  # Lightning calls this more than once
                autotp.shard(self.model, self.device_mesh, sample=(self.args, self.kwargs))
                self.args = None  # type: ignore[assignment]

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            mine.append(batch["input_ids"])
            return self.model(**batch).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _adamw(self.model)

    first, second = Lit(), Lit()
    reference = copy.deepcopy(first.model)
    with torch.no_grad():
        for p in second.model.parameters():
            p.zero_()  # whatever it has comes from the checkpoint
    with as_launched():
        for module, steps, path in ((first, 2, None), (second, 4, "last.ckpt")):
            one = lightning.Trainer(
                accelerator="cpu", devices=4, max_steps=steps, gradient_clip_val=0.5, default_root_dir=folder,
                strategy=ModelParallelStrategy(
                    data_parallel_size=2, tensor_parallel_size=2, process_group_backend="gloo"
                ),
                logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            )  # fmt: skip
            one.fit(module, DataLoader(Sentences(), batch_size=2), ckpt_path=path and f"{folder}/{path}")
            one.save_checkpoint(f"{folder}/last.ckpt")
    batches: list[Any] = [None] * 4
    dist.all_gather_object(batches, mine)
    expected = _adamw(reference)
    for ids in map(torch.cat, zip(batches[0], batches[2], strict=True)):
        reference(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        expected.step()
        expected.zero_grad()
    apart = sum(not torch.equal(a, b) for a, b in zip(batches[0], batches[2], strict=True))
    return {"trained": _apart(second.model, reference), "steps": len(mine), "apart": apart, "held": held(second.model)}


def trainer(payload: dict[str, Any]) -> dict[str, Any]:
    """transformers' Trainer: four steps of two batches with clipping, warm-up and decay; what it logs."""
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments
    from transformers.distributed import DistributedConfig

    model, args, kwargs = double("hf:llama")
    reference, logs = copy.deepcopy(model), []
    autotp.shard(model, mesh_of(2), sample=(args, kwargs))
    options: dict[str, Any] = {
        "output_dir": f"{payload['folder']}/{dist.get_rank()}", "use_cpu": True, "max_steps": 4, "max_grad_norm": 0.5,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "seed": 0,
        "adam_epsilon": 1e-3, "warmup_steps": 1, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip

    def train(which: nn.Module, **more: Any) -> None:
        one = Trainer(model=which, args=TrainingArguments(**options, **more), train_dataset=Sentences())
        one.train()
        logs.append([[line[k] for k in ("loss", "grad_norm", "learning_rate")] for line in one.state.log_history[:-1]])

    train(reference)
    try:
        with as_launched() if payload["launched"] else nullcontext():
            if payload["launched"] == "told":
                model.config.distributed_config = DistributedConfig(tp_size=2)
                train(model, parallelism_config=ParallelismConfig(tp_size=2))
            else:
                train(model)
    except ValueError as error:
        return {"refused": str(error)}
    return {"trained": _apart(model, reference), "logs": logs, "held": held(model)}


def accelerated(payload: object) -> dict[str, Any]:
    """A loop of accelerate's on a plain module: accumulation, clipping; which batches a rank has seen."""
    from accelerate import Accelerator, ParallelismConfig

    model, args, kwargs = double("user:nanogpt")
    reference, seen = copy.deepcopy(model), []
    autotp.shard(model, mesh_of(2), sample=(args, kwargs))
    model.tp_size = 2  # type: ignore[assignment]
    ids = [torch.randint(2, 64, (12,), generator=torch.Generator().manual_seed(i)) for i in range(8)]
    expected = _adamw(reference)
    with as_launched():
        tool = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=ParallelismConfig(tp_size=2))
        loader: Any = DataLoader(ids, batch_size=2)  # type: ignore[arg-type]
        which, optimizer, loader = tool.prepare(model, _adamw(model), loader)
        for batch in loader:
            seen.append(batch.tolist())
            with tool.accumulate(which):
                tool.backward(structures.weighted_sum(which(batch)))
                if tool.sync_gradients:
                    tool.clip_grad_norm_(which.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    for first in range(0, 8, 4):
        for batch in (ids[first : first + 2], ids[first + 2 : first + 4]):
            (structures.weighted_sum(reference(torch.stack(batch))) / 2).backward()  # type: ignore[operator, union-attr]
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        expected.step()
        expected.zero_grad()
    return {"trained": _apart(which, reference), "seen": seen, "held": held(model)}
