# make demo and make test do all of their own set-up in .venv, and reuse it afterwards.
PYTHON ?= python3
# Which OpenMMLab: openmmlab, its original packages; or onedl, the maintained forks. They share their
# import names, so each has an environment of its own.
STACK ?= openmmlab
TOOLBOXES_openmmlab := lite,det,seg,pretrain
TOOLBOXES_onedl := onedl-det,onedl-seg,onedl-pretrain
TOOLBOXES := $(or $(TOOLBOXES_$(STACK)),$(error STACK=$(STACK): there are openmmlab and onedl))
EXTRAS := $(TOOLBOXES),cpu,demo,export,gen,test
VENV := .venv$(if $(filter onedl,$(STACK)),-onedl)
BIN := $(VENV)/bin
# The library alone, from its wheel, and the tests of it.
LIBRARY := build/library
TESTS ?= kernels models generation checkpoints deploy test_library.py
WORKERS ?= auto
# Where to take torch and torchvision from, for the builds that PyTorch's own index alone has (CPU).
TORCH_INDEX ?=
# Bytecode of all files is a third of the time of an installation: Python makes it of what is imported.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
DEMO_DIR := work_dirs/demo
# The demo's products are small: more threads than a few wait for each other.
export OMP_NUM_THREADS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))

DOORS := $(addprefix tests/,compat openmmlab apis/test_train.py apis/test_finetune.py)
QUICK := $(addprefix tests/,models/test_contract.py models/test_mixer_contract.py models/test_layers.py \
	kernels/test_ops.py kernels/test_backend.py numbers/test_mixers.py examples)

.PHONY: help setup demo quick test test-doors test-library stress lint format docs dist try-dist gpu clean

help:
	@echo "make demo    set up, train Mask R-CNN with Vittt on the built-in data, show AP and pictures"
	@echo "make quick   the tests of models and ops, in two minutes"
	@echo "make test    set up, lint, run the tests"
	@echo "make test-library   the tests of the library from a wheel, without any OpenMMLab"
	@echo "make test-doors     the tests of what differs between the two OpenMMLabs, in four minutes"
	@echo "             setup, demo, test, test-doors and stress take STACK=onedl: the maintained forks"
	@echo "make stress  the tests that take minutes: kills, long sequences, whole models"
	@echo "make docs    guide and API reference in build/site; a warning is an error"
	@echo "make dist    wheel and sdist in dist/ [REPOSITORY=address of the sources, for the links of its page]"
	@echo "make try-dist   both of them in fresh environments, with README's commands of the library"
	@echo "make gpu     on a machine with a CUDA GPU: whole models and ops against the CPU, then times [OUT=folder] [PART=models|ops|times|sanitizer]"
	@echo "make lint    check format, style and types;  make format    put them right"

setup: $(VENV)/.installed

# mmdet, mmsegmentation and mmpretrain without a compiler: torchvision has mmcv's operators.
$(VENV)/.installed: setup.py pyproject.toml mmvttt/version.py mmvttt.pth
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "mmvttt needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip uv
	test -z "$(TORCH_INDEX)" || $(INSTALL) 'torch>=2.11,<2.16' torchvision --index-url '$(TORCH_INDEX)'
	# uv unpacks in parallel. It reads no pip.conf: behind a mirror of one, pip installs.
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[$(EXTRAS)]' || $(INSTALL) -e '.[$(EXTRAS)]'
	# OpenMMLab requires opencv-python, which needs libGL; a machine without it gets the headless build.
	$(BIN)/python -c 'import cv2' 2>/dev/null || { \
		found=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("opencv-python"))') && \
		$(BIN)/python -m pip uninstall --quiet --yes opencv-python opencv-python-headless && \
		$(INSTALL) "opencv-python-headless==$$found"; }
	$(BIN)/python -m mmvttt
	touch $@

demo: setup
	$(BIN)/python -m mmvttt.openmmlab.datasets.digits --root data/mmvttt_digits
	$(BIN)/python tools/train.py configs/maskrcnn_vittt_demo.py --work-dir $(DEMO_DIR) --resume
	$(BIN)/python tools/image_demo.py configs/maskrcnn_vittt_demo.py $(DEMO_DIR)/epoch_4.pth \
		data/mmvttt_digits/val/00000[0-7].png --out $(DEMO_DIR)/predictions
	cat $(DEMO_DIR)/*/vis_data/scalars.json | grep coco/bbox_mAP | tail -n 1

# What a change to a model or an op needs while it is made.
quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not stress" -n auto --maxprocesses 8 --dist loadfile -q \
		$(QUICK)

# One process a core, each with one thread: nothing here is large enough for two.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not stress" -n auto --maxprocesses 8 --dist loadfile \
		--durations 15 --durations-min 5

# What differs between the two OpenMMLabs: patches, start-up line, models, trainings.
test-doors: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not stress" -n auto --maxprocesses 8 --dist loadfile $(DOORS)

# What the library alone has to do, in a fresh environment: its wheel, torch, timm and diffusers, and
# what the other environments cannot have: transformers, and OpenVINO, which ends a worker of xdist
# (WORKERS=0). The line of `pip list` is the promise: no OpenMMLab, no OpenCV.
test-library:
	rm -rf $(LIBRARY) && $(PYTHON) -m venv $(LIBRARY)
	test -z "$(TORCH_INDEX)" || $(LIBRARY)/bin/python -m pip install --quiet 'torch>=2.11,<2.16' torchvision --index-url '$(TORCH_INDEX)'
	$(LIBRARY)/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(LIBRARY)/dist .
	# uv links what the other environment has; without it, pip.
	wheel="$$(echo $(LIBRARY)/dist/mmvttt-*.whl)[sd3,transformers,openvino,test]"; \
		$(BIN)/uv pip install --quiet --python $(LIBRARY)/bin/python "$$wheel" peft scipy || \
		$(LIBRARY)/bin/python -m pip install --quiet --no-compile "$$wheel" peft scipy
	! $(LIBRARY)/bin/python -m pip list | grep -iE '^(onedl-)?mm(engine|cv|det|seg|pretrain)|opencv'
	cd tests && OMP_NUM_THREADS=1 ../$(LIBRARY)/bin/python -m pytest -m "not stress" -n $(WORKERS) \
		--maxprocesses 8 --dist loadfile $(TESTS)

stress: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m stress -n auto --maxprocesses 8 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ttt_kernels is the folder kernels/: the reference finds it by a link of that name.
docs: setup
	$(INSTALL) -e '.[docs]'
	mkdir -p build/docs && ln -sfn ../../kernels build/docs/ttt_kernels
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

dist: setup
	rm -rf dist
	MMVTTT_REPOSITORY='$(REPOSITORY)' $(BIN)/python -m build

# What `make dist` has built, each in a fresh environment, with README's commands of the library.
try-dist:
	for file in dist/*.whl dist/*.tar.gz; do \
		rm -rf build/try && $(PYTHON) -m venv build/try && \
		{ $(BIN)/uv pip install --quiet --python build/try/bin/python "$$file" || \
			build/try/bin/python -m pip install --quiet --no-compile "$$file"; } && \
		(cd build/try && bin/mmvttt && bin/mmvttt weights && bin/mmvttt get_flops vittt_tiny_patch16_224 && bin/python -c \
			"import timm, mmvttt; print(mmvttt.linearize(timm.create_model('vit_small_patch16_dinov3')))") || exit 1; \
	done

# Needs no set-up: torch, Triton, timm, pytest and a GPU.
gpu:
	$(PYTHON) tools/dev/gpu_check.py $(if $(OUT),--out $(OUT)) $(if $(PART),--part $(PART))

clean:
	rm -rf build *.egg-info work_dirs/demo
