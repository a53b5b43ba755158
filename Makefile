# One verb per command; `make` alone lists them. CI runs the same ones. Needs make, a POSIX shell and Python 3.11 to 3.14.
# Everything is installed into .venv from hashed lists of exact versions; nothing outside this folder changes.

# ---- Settings, each can be given on the command line: `make test PYTEST_ARGS='-k config'`

# The CUDA build of fbgemm loads only where the NVIDIA driver is installed, the CPU build anywhere.
ACCELERATOR ?= $(shell if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi)

# A number, or auto: one process per GPU, two without GPUs.
PROCESSES ?= auto
QUICKSTART_ARGS ?= train --train.run quickstart
BENCH_ARGS ?=
SOAK_KILLS ?= 100
PYTEST_ARGS ?=
# Processes that run tests side by side. Each needs up to 2 GiB; `-n 0` in PYTEST_ARGS runs all in one.
TEST_PROCESSES ?= 2

# ---- Internal

# For programs in tests/ that are started directly; pytest has its own setting in pyproject.toml.
TEST_PY = PYTHONPATH=.:tests/support:tests/trainer $(PY)

VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
# With ACCELERATOR=cpu on a machine with GPUs, torch must not see GPUs that the CPU build of fbgemm cannot use.
TRAINER = $(if $(filter cpu,$(ACCELERATOR)),CUDA_VISIBLE_DEVICES= )$(PY) -m trainer
STAMPS := $(VENV)/.stamps
PACKAGES := infra trainer workloads
# With .venv/bin first on PATH, the engine's language host finds this environment's Python.
WITH_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

# The pinned lists, each next to the package that needs it.
LIST_bootstrap := trainer/requirements-bootstrap.txt
LIST_trainer-cpu := trainer/requirements-cpu.txt
LIST_trainer-gpu := trainer/requirements-gpu.txt
LIST_infra := requirements.txt
LIST_policy := infra/policy/requirements.txt
LIST_doctor := infra/requirements-doctor.txt
LIST_managed := infra/requirements-managed.txt
LIST_test := tests/requirements.txt
LIST_lint := tests/requirements-lint.txt
LISTS := bootstrap trainer-cpu trainer-gpu infra policy doctor managed test lint
ALL_INFRA := install-infra install-doctor install-managed

.DEFAULT_GOAL := help
# Installs write to one .venv, and each of them is parallel inside; `make -j2 lint test` must not run two at once.
.NOTPARALLEL:
.PHONY: help quickstart test test-long test-cluster test-engine test-engine-full test-node node-up node-down node-packages \
	soak lint format bench lock clean venv supported-cpu supported-gpu $(addprefix install-,$(LISTS))
export PYTHON

##@ Use
quickstart: install-trainer-$(ACCELERATOR) ## Install the trainer and train a sharded DLRM on all GPUs, or on two CPU processes
	@$(TRAINER) launch --nproc $(PROCESSES) $(QUICKSTART_ARGS)

bench: install-trainer-$(ACCELERATOR) ## Compare training speed with the stock TorchRec step
	@$(TRAINER) bench $(BENCH_ARGS)

install-trainer: install-trainer-$(ACCELERATOR) ## Install the trainer only

install-infra: ## Install the Pulumi program, its policy pack and `python -m infra|workloads`

install-doctor: ## Install the clouds' clients for `python -m infra doctor`

install-managed: ## Install the clients of Vertex AI and Azure ML (job.launcher vertex, azureml)

##@ Develop
test: install-trainer-$(ACCELERATOR) $(ALL_INFRA) install-test ## Install what the tests need and run them (PYTEST_ARGS='-k name')
	@$(PY) -m pytest -n $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

test-long: install-trainer-$(ACCELERATOR) $(ALL_INFRA) install-test ## Run the full cases of which `make test` runs reduced ones
	@$(PY) -m pytest -m long $(PYTEST_ARGS)

test-cluster: install-trainer-$(ACCELERATOR) install-infra install-test ## Run jobs on a real Kubernetes control plane, built once with Go (15 min)
	@$(PY) -m pytest tests/cluster $(PYTEST_ARGS)

test-engine: install-infra install-test ## Run every stack on simulated clouds with the real Pulumi engine (5 to 10 min)
	@$(WITH_VENV) $(PY) -m pytest tests/engine $(PYTEST_ARGS)

test-engine-full: install-infra install-test ## The same, with a failure at every single create (30 min)
	@$(WITH_VENV) ENGINE_FULL=1 $(PY) -m pytest tests/engine $(PYTEST_ARGS)

test-node: install-trainer-$(ACCELERATOR) install-infra install-test ## Run the image on a real node, with faults (root; 25 to 40 min)
	@$(WITH_VENV) $(PY) -m pytest tests/node $(PYTEST_ARGS)

node-up: install-test ## Start a Kubernetes node of containers on this machine (root, Linux) and print its kubeconfig
	@$(TEST_PY) tests/node/node.py up

node-down: install-test ## Remove that node and everything that belongs to it
	@$(TEST_PY) tests/node/node.py down

node-packages: install-test ## Install the Debian or Ubuntu packages that a node needs (root)
	apt-get update && apt-get install --yes --no-install-recommends $$($(TEST_PY) tests/node/node_build.py)

soak: install-trainer-$(ACCELERATOR) install-test ## Kill training runs SOAK_KILLS times (100) and print the cost
	@$(TEST_PY) tests/trainer/faults/soak.py $(SOAK_KILLS)

lint: install-trainer-$(ACCELERATOR) $(ALL_INFRA) install-test install-lint ## Check style, wording, layers, types and the Dockerfile
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) tests/plain_english.py
	@$(VENV)/bin/lint-imports
	@$(PY) -m mypy --strict $(PACKAGES)
	@$(VENV)/bin/hadolint trainer/Dockerfile

format: install-lint ## Rewrite the code in the project's style
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## Remove .venv and caches; runs/ and data/ stay
	rm -rf $(VENV) .cache .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

##@ Maintain
lock: install-bootstrap ## Recompile the pinned lists from pyproject.toml (UPGRADE=1 takes the newest versions)
	@rm -rf $(LOCK); mkdir -p $(LOCK)
	@# The present pins are preferences: a lock changes no more than it must.
	@if [ -n "$(UPGRADE)" ]; then : > $(LOCK)/all.txt; else cat $(foreach list,$(LISTS),$(wildcard $(LIST_$(list)))) > $(LOCK)/all.txt; fi
	@# All extras first: this picks one version of each package, which every list then uses.
	@$(COMPILE) --all-extras --output-file $(LOCK)/all.txt > /dev/null
	$(call compile,bootstrap,bootstrap)
	$(call compile,trainer-cpu,trainer trainer-cpu,fbgemm-gpu $(CUDA_ONLY))
	$(call compile,trainer-gpu,trainer trainer-gpu)
	$(call compile,infra,infra)
	$(call compile,policy,policy)
	$(call compile,doctor,doctor)
	$(call compile,managed,managed)
	$(call compile,test,test)
	$(call compile,lint,lint)
	@$(foreach list,$(LISTS),mv $(LOCK)/$(list).txt $(LIST_$(list));)

help: ## List the commands
	@echo "usage: make COMMAND"
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-18s%s\n", $$1, $$2 }' Makefile
	@echo
	@echo "settings: PYTHON=python3.12  ACCELERATOR=cpu|gpu  PROCESSES=N  PYTEST_ARGS=..."

# ---- The virtual environment

# Keep a complete .venv that runs and has the version that PYTHON names. Otherwise create one with the first allowed Python:
# `python3` if it is allowed, because that is what a user's shell runs.
venv:
	@allowed='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'; \
	version='import sys; print("%d.%d.%d" % sys.version_info[:3])'; \
	fail() { echo "error: $$*" >&2; exit 2; }; \
	if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; \
	elif [ -e $(STAMPS)/venv ] && $(PY) -c '' 2> /dev/null; then exit 0; \
	else set -- python3 python3.13 python3.12 python3.11 python3.14 python; fi; \
	python=; seen=; \
	for candidate in "$$@"; do \
		found=$$("$$candidate" -c "$$version" 2> /dev/null) || continue; \
		seen="$$seen $$candidate is $$found,"; \
		if "$$candidate" -c "$$allowed"; then python=$$candidate; break; fi; \
	done; \
	seen=$${seen# }; [ -n "$$python" ] || fail "$${seen:-no Python found ($$*),} but Python 3.11 to 3.14 is needed:" \
		"install one, or name it with make PYTHON=/path/to/python3.12"; \
	if [ -e $(STAMPS)/venv ] && [ "$$($(PY) -c "$$version" 2> /dev/null)" = "$$found" ]; then exit 0; fi; \
	"$$python" -c 'import ensurepip, venv' 2> /dev/null || fail "$$python ($$found) has no venv module:" \
		"install it (Debian and Ubuntu: apt install python$${found%.*}-venv), or name another with make PYTHON=..."; \
	echo "Creating $(VENV) with $$python ($$found)"; \
	rm -rf $(VENV) && "$$python" -m venv $(VENV) && mkdir $(STAMPS) && : > $(STAMPS)/venv

# Install uv, then this project itself (editable): `trainer` and `python -m infra` then work from any folder.
install-bootstrap: venv
	@sum=$$(cksum < $(LIST_bootstrap)); \
	if [ "$$sum" != "$$(cat $(STAMPS)/bootstrap 2> /dev/null)" ] || ! $(UV) --version > /dev/null 2>&1; then \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --force-reinstall \
			--requirement $(LIST_bootstrap) && echo "$$sum" > $(STAMPS)/bootstrap; \
	fi
	@sum=$$(cksum < pyproject.toml); \
	if [ "$$sum" != "$$(cat $(STAMPS)/project 2> /dev/null)" ]; then \
		$(UV) pip install --quiet --offline --python $(PY) --no-deps --editable . && echo "$$sum" > $(STAMPS)/project; \
	fi

# A stamp holds the checksum of its list and is empty during an install. An empty stamp means that the last install was
# interrupted, perhaps inside a package: reinstall the whole list (from uv's cache: seconds).
# Trust a full stamp only if uv finds every package of the list installed.
UV_PIP = $(UV) pip install --python $(PY) --no-deps --require-hashes
define install
	@list=$(LIST_$(1)); stamp=$(STAMPS)/$(1); sum=$$(cksum < $$list); reinstall=; \
	if [ "$$sum" = "$$(cat $$stamp 2> /dev/null)" ] && \
		$(UV_PIP) --dry-run --requirement $$list 2>&1 | grep -q 'Would make no changes'; then exit 0; fi; \
	if [ -e $$stamp ] && ! [ -s $$stamp ]; then reinstall=--reinstall; fi; \
	echo "Installing $$list into $(VENV)$(if $(2), ($(2)))"; \
	: > $$stamp; \
	(seconds=0; while sleep 10 > /dev/null 2>&1 && kill -0 $$$$ 2> /dev/null; do \
		seconds=$$((seconds + 10)); echo "  still installing after $$seconds s"; done) & beat=$$!; \
	trap 'kill $$beat 2> /dev/null' EXIT; \
	$(UV_PIP) --quiet $$reinstall --requirement $$list && echo "$$sum" > $$stamp
endef

# Stop before the install where fbgemm has no wheel.
supported-cpu: platforms = "Linux x86_64" | "Linux aarch64"
supported-cpu: advice = it has some for Linux on x86_64 and aarch64, so use a container or a remote machine
supported-gpu: platforms = "Linux x86_64"
supported-gpu: advice = ACCELERATOR=cpu ignores the GPUs
supported-cpu supported-gpu: supported-%:
	@case "$$(uname -s) $$(uname -m)" in $(platforms)) ;; *) \
		echo "error: fbgemm has no $* wheel for $$(uname -s) on $$(uname -m); $(advice)" >&2; exit 2 ;; esac

# Both builds of fbgemm own the same files: remove one before installing the other.
define replace_fbgemm
	@if $(UV) pip show --quiet --python $(PY) $(1) 2> /dev/null; then \
		$(UV) pip uninstall --quiet --python $(PY) fbgemm-gpu fbgemm-gpu-cpu; fi
endef

install-trainer-cpu: supported-cpu install-bootstrap
	$(call replace_fbgemm,fbgemm-gpu)
	$(call install,trainer-cpu,2.6 GB to download the first time)

install-trainer-gpu: supported-gpu install-bootstrap
	$(call replace_fbgemm,fbgemm-gpu-cpu)
	$(call install,trainer-gpu,3.5 GB to download the first time)

install-trainer-%:
	@echo "error: unknown ACCELERATOR: got '$*'; allowed: cpu, gpu" >&2; exit 2

install-infra: install-policy

install-infra install-policy install-doctor install-managed install-test install-lint: install-%: install-bootstrap
	$(call install,$*)

# ---- Lists of pinned dependencies

LOCK := .cache/lock
COMPILE = $(UV) pip compile pyproject.toml --quiet --universal --python-version 3.11 --fork-strategy fewest \
	--no-annotate --no-header --no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade)

# torch links against most of CUDA even without a GPU. These are the parts that it loads only for work on a GPU:
# torch, torchrec, fbgemm, gloo, torch.compile on CPU and the profiler run without them, with 0.5 GB less to download and
# 1.2 GB less on disk. The rest are NEEDED entries of libtorch_cuda.so, without which `import torch` fails.
CUDA_ONLY := triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cusolver nvidia-nvtx

# $(call compile,LIST,EXTRAS,PACKAGES TO LEAVE OUT)
define compile
	@echo "Locking $(LIST_$(1))"
	@$(COMPILE) $(addprefix --extra ,$(2)) $(addprefix --no-emit-package ,$(3)) --generate-hashes \
		--constraints $(LOCK)/all.txt --output-file $(LOCK)/$(1).txt > /dev/null
	@{ echo '# Compiled from pyproject.toml by `make lock`. Complete, so it is installed with --no-deps --require-hashes.'; \
		cat $(LOCK)/$(1).txt; } > $(LOCK)/list && mv $(LOCK)/list $(LOCK)/$(1).txt
endef
