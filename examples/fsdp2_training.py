"""Trains a linearized ViT sharded over all processes (FSDP2), without OpenMMLab.

Each block is a unit of `fully_shard`: its parameters are gathered when it runs and freed after it.
torch.distributed.checkpoint saves the shards of model and optimizer, and loads them on any number
of processes.

example: torchrun --standalone --nproc-per-node 8 examples/fsdp2_training.py work_dirs/fsdp2
"""

import argparse
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mmvttt
from mmvttt.deploy.compile import blocks_of


def build() -> nn.Module:
    """The model, on all processes with the same weights."""
    torch.manual_seed(0)
    options = dict(embed_dim=64, depth=4, num_heads=2, num_classes=10, dynamic_img_size=True)
    vit = timm.create_model('vit_small_patch16_dinov3', **options)
    mmvttt.linearize(vit)
    return vit


def shard(model: nn.Module) -> nn.Module:
    """Shards the model by blocks, in place. What is outside of blocks is one more unit."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of this process's images; its gradients are means over all processes."""
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss.detach()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Each process writes its shards into the folder."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save(dict(model=weights, optimizer=state), checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Reads the shards of a folder, whatever number of processes wrote it."""
    weights, state = get_state_dict(model, optimizer)
    dcp.load(dict(model=weights, optimizer=state), checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=Path, help='where the checkpoint is, or will be')
    parser.add_argument('--steps', type=int, default=10)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group()
    model = shard(build())
    # After sharding: the optimizer's parameters are the shards.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if args.folder.exists():
        load(model, optimizer, args.folder)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(dist.get_rank())
    for number in range(args.steps):
        # Your batch of this process.
        images = torch.randn(2, 3, 64, 96, generator=generator).to(device)
        labels = torch.randint(10, (2,), generator=generator).to(device)
        loss = step(model, images, labels)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f'step {number}: loss {loss.item() / dist.get_world_size():.4f}')
    save(model, optimizer, args.folder)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
