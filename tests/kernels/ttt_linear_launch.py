"""Goes through kernel.py's launches as on an H100, up to the launch itself: run by a test.

Triton takes the arguments, specialises on them and compiles, for a GPU that only this driver has.
Prints the number of variants of each kernel, after calls with several sizes.
"""

import json

import torch
from scans import make
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ttt_kernels.ttt_linear import _backward_kernels, _forward_kernels, kernel
from ttt_kernels.ttt_linear.definition import Inputs


class NoGpu:
    """Answers to Triton's questions to a driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget('cuda', 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(NoGpu())
    run = JITFunction.run
    JITFunction.run = lambda *args, warmup, **options: run(*args, warmup=True, **options)
    for apart, keep in ((False, False), (False, True), (True, True)):
        kernel.output_apart = lambda *_, apart=apart: apart
        for tokens, batch, heads in ((1, 1, 1), (50, 2, 3), (64, 1, 8)):
            # All sequences are in one projection, as a model has them.
            inputs = make(tokens, batch=batch, heads=heads, dim=64, dtype=torch.bfloat16)
            packed = torch.cat([inputs[n] for n in 'qkv'], dim=-1)
            inputs.update(zip('qkv', packed.chunk(3, -1), strict=True))
            o, *saved = kernel.forward(Inputs(**inputs), 'fb', 16, 1e-6, keep)
            if keep:
                kernel.backward(o, Inputs(**inputs), *saved, 'fb', 16, 1e-6)
    variants = {
        name: len(function.device_caches[0][0])
        for module in (_forward_kernels, _backward_kernels)
        for name, function in vars(module).items()
        if name.startswith(('forward_', 'backward_'))
    }
    print(json.dumps(variants))


if __name__ == '__main__':
    main()
