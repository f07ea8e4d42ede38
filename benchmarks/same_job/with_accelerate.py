"""With accelerate's FSDP2, launched as eight processes by `torchrun`."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.same_job import job
from benchmarks.same_job.cpu import shard_on_cpu  # not counted

shard_on_cpu()  # not counted
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16",
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=2**10,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    ),
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    project_config=ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, total_limit=2
    ),
)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(job.FEATURES, job.WIDTH),
    nn.GELU(),
    nn.Linear(job.WIDTH, job.WIDTH),
    nn.GELU(),
    nn.Linear(job.WIDTH, job.CLASSES),
)


def load(seed, shuffle):
    x, y = map(torch.from_numpy, job.examples(seed))
    return DataLoader(TensorDataset(x, y.long()), job.BATCH // 8, shuffle=shuffle)


optimizer = torch.optim.AdamW(model.parameters(), job.LEARNING_RATE, weight_decay=1e-4)
model, optimizer, train, evaluation = accelerator.prepare(
    model, optimizer, load(0, True), load(1, False)
)


def measure(batch):
    x, y = batch
    logits = model(x).float()
    loss = F.cross_entropy(logits, y)
    return loss, torch.stack([loss.detach(), (logits.argmax(-1) == y).float().mean()])


def show(step, name, values):
    loss, accuracy = accelerator.reduce(torch.stack(values).mean(0), "mean").tolist()
    accelerator.print(f"step {step} {name} loss {loss:.4f}  accuracy {accuracy:.4f}")


class Progress:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


progress = Progress()
accelerator.register_for_checkpointing(progress)
if saved := sorted(folder.glob("checkpoints/checkpoint_*"), key=lambda x: int(x.name[11:])):
    accelerator.load_state(str(saved[-1]))
    accelerator.project_configuration.iteration = int(saved[-1].name[11:]) + 1
kept = []
while progress.step < steps:
    epoch, skipped = divmod(progress.step, len(train))
    train.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(train, skipped):
        loss, metrics = measure(batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        kept.append(metrics)
        is_last = progress.step == steps
        if progress.step % job.LOG == 0 or is_last:
            show(progress.step, "train", kept)
            kept = []
        if progress.step % job.SAVE == 0 or is_last:
            accelerator.save_state()
        if is_last:
            break
with torch.no_grad():
    show(steps, "eval", [measure(batch)[1] for batch in evaluation])
job.show_torch_share(model, optimizer)  # not counted
accelerator.end_training()
