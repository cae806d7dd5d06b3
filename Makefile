# make demo and make test do all of their own set-up in .venv, and reuse it afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where to take torch and torchvision from, for the builds that PyTorch's own index alone has (CPU).
TORCH_INDEX ?=
# Bytecode of all files is a third of the time of an installation: Python makes it of what is imported.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
DEMO_DIR := work_dirs/demo
# The demo's products are small: more threads than a few wait for each other.
export OMP_NUM_THREADS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))

.PHONY: help setup demo test stress lint format docs dist gpu clean

help:
	@echo "make demo    set up, train Mask R-CNN with Vittt on the built-in data, show AP and pictures"
	@echo "make test    set up, lint, run the tests"
	@echo "make stress  the tests that take minutes: kills, long sequences, whole models"
	@echo "make docs    guide and API reference in build/site; a warning is an error"
	@echo "make dist    wheel and sdist in dist/ [REPOSITORY=address of the sources, for the links of its page]"
	@echo "make gpu     on a machine with a CUDA GPU: the kernels' tests on it, benchmarks of ops and models [OUT=folder] [PART=sanitizer|tests|benchmarks|plan|models]"
	@echo "make lint    check format, style and types;  make format    put them right"

setup: $(VENV)/.installed

# mmdet, mmsegmentation and mmpretrain without a compiler: mmcv-lite and torchvision.
$(VENV)/.installed: setup.py pyproject.toml mmvttt/version.py
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "mmvttt needs Python 3.10 or newer: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	test -z "$(TORCH_INDEX)" || $(INSTALL) 'torch>=2.11,<2.15' torchvision --index-url '$(TORCH_INDEX)'
	$(INSTALL) -e '.[lite,all]'
	# mmengine requires opencv-python, which needs libGL; a machine without it gets the headless build.
	$(BIN)/python -c 'import cv2' 2>/dev/null || { \
		$(BIN)/python -m pip uninstall --quiet --yes opencv-python opencv-python-headless && \
		$(INSTALL) 'opencv-python-headless>=4.9,<6'; }
	$(BIN)/python -m mmvttt
	touch $@

demo: setup
	$(BIN)/python -m mmvttt.datasets.digits --root data/mmvttt_digits
	$(BIN)/python tools/train.py configs/maskrcnn_vittt_demo.py --work-dir $(DEMO_DIR) --resume
	$(BIN)/python tools/draw_predictions.py configs/maskrcnn_vittt_demo.py $(DEMO_DIR) --grid 8
	$(BIN)/python tools/analyze_logs.py $(DEMO_DIR) --metrics \
		coco/bbox_mAP_50 coco/bbox_mAP coco/segm_mAP_50 coco/segm_mAP

# One process a core, each with one thread: nothing here is large enough for two.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not stress" -n auto --maxprocesses 8 --dist loadfile \
		--durations 15 --durations-min 5

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
	$(BIN)/mkdocs build

dist: setup
	MMVTTT_REPOSITORY='$(REPOSITORY)' $(BIN)/python -m build

# Needs no set-up: torch, Triton and a GPU are enough; the models need mmengine and timm too.
gpu:
	$(PYTHON) tools/gpu_check.py $(if $(OUT),--out $(OUT)) $(if $(PART),--part $(PART))

clean:
	rm -rf build *.egg-info work_dirs/demo
