# Targets set up the environment first; a second time costs nothing.
#
#   NB=03              only notebook 03 (run, test, outputs)
#   PYTHON=python3.12  which Python makes .venv
#   TORCH_INDEX=URL    where PyTorch's wheels come from; everything else comes from pip's usual index
#   VENV=FOLDER        use this environment, also one that has PyTorch already

VENV ?= .venv
export VENV PYTHON TORCH_INDEX

# Waiting threads sleep. Else they keep the cores busy, and training on a machine with other work to do crawls.
export OMP_WAIT_POLICY ?= PASSIVE
python = $(VENV)/bin/python

# pytest takes a test whose file or name has "03_" in it
only = $(if $(NB),$(if $(wildcard notebooks/$(NB)_*.ipynb),-k $(NB)_,$(error no notebook is called notebooks/$(NB)_*.ipynb)))

.PHONY: help setup lab run test outputs reset soak bench

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

setup: ## make .venv and install what pyproject.toml lists
	@sh tools/setup.sh

lab: setup ## open the notebooks in JupyterLab
	$(python) -m jupyterlab notebooks

run: setup ## run every notebook; results in build/index.html
	@$(python) tools/series.py run $(NB)

# Without GPUs, so that all machines test the same thing.
test: setup ## lint, unit tests, script tests and notebooks, compared with their committed outputs
	$(python) -m ruff check
	CUDA_VISIBLE_DEVICES= $(python) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(only)

outputs: setup ## run every notebook in place, to commit its outputs (on the real MNIST)
	@$(python) tools/series.py outputs $(NB)

reset: ## bring back scripts/ and notebooks/ as committed; your edits go to build/
	@$(or $(wildcard $(python)),python3) tools/reset.py

soak: setup ## launch a two-process script 50 times in a row, and kill trainings 100 times
	$(python) -m pytest tests/test_soak.py --launches 50
	$(python) -m pytest tests/test_elastic.py -k random_moments --kills 100

# Alone on the machine, threads may wait as PyTorch lets them: that is what a reader's terminal does, too.
bench: setup ## measure the figures in README.md
	env -u OMP_WAIT_POLICY $(python) benchmarks/speed.py
