"""Packaging of the library (`mmvttt`), its kernels (`ttt_kernels`) and its configs (for `::`)."""

import os
import shutil
from pathlib import Path
from runpy import run_path  # noqa: TID251

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# `_base_ = 'mmvttt::…'`, `mim` and the inferencers look for these under mmvttt/.mim.
MIM_PARTS = ('configs', 'tools', 'model-index.yml')
# For work on mmvttt itself: they read its tests, documents and kernels' sources.
NOT_SHIPPED = ('__pycache__', 'dev')
# Goes into site-packages itself, so that stock tools import mmvttt: see mmvttt_startup.py.
STARTUP = 'mmvttt.pth'
VERSION = run_path(str(ROOT / 'mmvttt' / 'version.py'))['__version__']
# Where the sources are public: `make dist REPOSITORY=https://github.com/…`.
REPOSITORY = os.environ.get('MMVTTT_REPOSITORY', '').rstrip('/')


class BuildWithMim(build_py):
    """Puts configs and tools under `mmvttt/.mim`: links if editable, copies in a wheel."""

    def run(self) -> None:
        super().run()
        # In an editable install: all that is not a link to the sources.
        wheel = self.get_finalized_command('install').install_lib
        library = wheel if self.editable_mode else self.build_lib
        self.copy_file(str(ROOT / STARTUP), str(Path(library) / STARTUP))
        base = ROOT if self.editable_mode else Path(self.build_lib)
        target = base / 'mmvttt' / '.mim'
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in MIM_PARTS:
            source = ROOT / name
            if self.editable_mode:
                (target / name).symlink_to(Path('..') / '..' / name)
            elif source.is_dir():
                ignored = shutil.ignore_patterns(*NOT_SHIPPED)
                shutil.copytree(source, target / name, ignore=ignored)
            else:
                shutil.copy(source, target / name)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / STARTUP)]


def readme() -> str:
    """The README with absolute links: an index shows it without the repository."""
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    if REPOSITORY:
        there = f']({REPOSITORY}/%s/v{VERSION}/'
        text = text.replace('](docs/pictures/', f'{there % "raw"}docs/pictures/')
        for start in ('docs/', 'CHANGELOG', 'CITATION', 'CONTRIBUTING'):
            text = text.replace(f']({start}', f'{there % "blob"}{start}')
    return text


# Ranges that were tried.
INSTALL = [
    # 2.11 is the common GPU image, 2.15 the newest release; stress tests have run with 2.14 only.
    # `mmvttt` lists the same. CUDA builds bring the Triton that they were tested with; without it
    # the ops run their definitions in PyTorch.
    'torch>=2.11,<2.16',
    'torchvision>=0.26,<0.30',
    # In older versions a model does not remember its options, which save_pretrained writes.
    'timm>=1.0.31,<1.1',
    'numpy>=1.26,<2.6',
    'pillow>=10.1,<14',
    'safetensors>=0.4,<1',
    # Older versions always leave a marker on a disk without locks.
    'filelock>=3.24.3,<5',
    # torch and timm need them too.
    'huggingface-hub>=0.30,<3',
    'tqdm>=4.60,<5',
]
# The two OpenMMLabs share their import names, so no extra of one may bring a package of the other.
MMENGINE = 'mmengine>=0.10.7,<0.11'
# What our own files of the door import, and each OpenMMLab needs too.
DOOR = ['opencv-python>=4.5', 'pyyaml>=6,<7', 'rich>=13']
COCO = ['pycocotools>=2.0.7,<3', 'scipy>=1.11,<2', 'faster-coco-eval>=1.6,<2']
# pip builds onedl-mmcv in an environment without torch, where it compiles nothing.
ONEDL = [*DOOR, 'onedl-mmengine>=0.10.12,<0.11', 'onedl-mmcv>=2.3.6,<2.4']
ONNX = [
    *('onnx>=1.19,<1.24', 'onnx-ir>=0.1,<2', 'onnxscript>=0.7,<0.8'),
    'onnxruntime>=1.23,<1.33',
]
EXTRAS = {
    # The original packages. Without mmcv's compiled operators; never with `mmcv` itself (same
    # import). 2.1.0 because mmdet 3.3 and mmsegmentation 1.2 refuse 2.2.
    'lite': [MMENGINE, *DOOR, 'mmcv-lite==2.1.0'],
    # Any pycocotools: the patch `coco-ids` adds the `info` that 2.0.9 and 2.0.10 need in a file.
    'det': [MMENGINE, *DOOR, *COCO, 'mmdet==3.3.0'],
    # mmsegmentation imports ftfy and regex without declaring them.
    'seg': [MMENGINE, *DOOR, 'mmsegmentation==1.2.2', 'ftfy', 'regex'],
    'pretrain': [MMENGINE, *DOOR, 'mmpretrain==1.2.0'],
    # The maintained forks.
    'onedl-det': [*ONEDL, *COCO, 'onedl-mmdetection>=3.5.1,<3.6'],
    'onedl-seg': [*ONEDL, 'onedl-mmsegmentation>=1.4.2,<1.5'],
    'onedl-pretrain': [*ONEDL, 'onedl-mmpretrain>=1.3.6,<1.4'],
    # The kernels of a CPU.
    'cpu': ['numba>=0.65,<0.69', 'llvmlite'],
    # To write ONNX with tools/export.py and to compare it.
    'export': ONNX,
    # DiT and Stable Diffusion 3, for linearize() and models/generation.
    'gen': ['diffusers>=0.42,<0.43'],
    # The text encoders of SD3's pipelines; apart, as mmpretrain 1.2 cannot be imported where
    # transformers 5 is installed.
    'sd3': ['diffusers>=0.42,<0.43', 'transformers>=5.24,<6', 'accelerate>=1.10,<2'],
    # For linearize(). 5.0 is the first whose attentions call one function that can be replaced.
    'transformers': ['transformers>=5.24,<6'],
    # tools/export.py --out model.xml, which goes through ONNX.
    'openvino': ['openvino>=2026.4,<2027', *ONNX],
    # Detections as supervision has them.
    'predict': ['supervision>=0.26,<0.32'],
    # Curves, receptive fields and gradient maps as pictures.
    'plots': ['matplotlib>=3.8,<4'],
    # The photographs and digits of the built-in data set, and its pictures.
    'demo': ['scikit-learn>=1.5,<2', 'scikit-image>=0.24,<0.27', 'matplotlib>=3.8,<4'],
    # One minor release of ruff: the next one formats other things.
    'test': [
        # Older ones do not find the modules beside a test.
        'pytest>=8.3.4,<10',
        'pytest-xdist>=3.6,<4',
        'hypothesis>=6.100,<7',
        'ruff>=0.17,<0.18',
        # One minor release of mypy too: each sees more than the last.
        'mypy>=2.4,<2.5',
        'types-PyYAML',
        'build>=1.2,<2',
        # The interpreter that the kernels are tested in; torch's CPU builds do not bring it.
        'triton>=3.6,<3.10; platform_system == "Linux"',
    ],
    'docs': ['mkdocs>=1.6,<1.7', 'mkdocs-material>=9.7,<9.9', 'mkdocstrings[python]>=1.0,<2'],
}

packages = find_packages(include=['mmvttt', 'mmvttt.*'])
packages += ['ttt_kernels', *(f'ttt_kernels.{p}' for p in find_packages('kernels'))]

setup(
    name='mmvttt',
    version=VERSION,
    description='Linear-time Test-Time-Training backbones for vision: torch, timm, OpenMMLab',
    long_description=readme(),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    project_urls={'Source': REPOSITORY} if REPOSITORY else {},
    keywords='object detection, segmentation, test-time training, Triton, OpenMMLab',
    # Those that were installed and tried.
    classifiers=[f'Programming Language :: Python :: 3.{minor}' for minor in (11, 12, 13)],
    # diffusers (`gen`) needs 3.11.
    python_requires='>=3.11',
    packages=packages,
    package_data={'mmvttt': ['py.typed', 'checkpoints/weights/*'], 'ttt_kernels': ['py.typed']},
    py_modules=['mmvttt_startup'],
    entry_points={'console_scripts': ['mmvttt = mmvttt.__main__:main']},
    # The folder is `kernels/` and the import `ttt_kernels`: a top-level package named `kernels`
    # would shadow another distribution.
    package_dir={'ttt_kernels': 'kernels'},
    install_requires=INSTALL,
    extras_require=EXTRAS,
    cmdclass={'build_py': BuildWithMim},
    zip_safe=False,
)
