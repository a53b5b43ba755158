# One verb per command; `make` alone lists them. CI runs the same ones. Needs make, a POSIX shell and Python 3.11 to 3.14.
# Everything is installed into .venv, from hashed lists of exact versions, so nothing outside this folder changes.

# ---- Settings: each can be given on the command line, as in `make test PYTEST_ARGS='-k config'`

# The CUDA build of fbgemm loads only where the NVIDIA driver is installed, the CPU build anywhere: ask the driver itself.
ACCELERATOR ?= $(shell if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi)

# A number, or auto: one process per GPU, two where there is none.
PROCESSES ?= auto
QUICKSTART_ARGS ?= train --train.run quickstart
BENCH_ARGS ?=
SOAK_KILLS ?= 100
PYTEST_ARGS ?=

# What mypy reads: those of the three packages that exist.
PACKAGES ?= $(patsubst %/__init__.py,%,$(wildcard trainer/__init__.py infra/__init__.py workloads/__init__.py))

# ---- Nothing below is meant to be set from outside

VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
# With ACCELERATOR=cpu on a machine that has GPUs, torch must not see what the CPU build of fbgemm has no code for.
TRAINER = $(if $(filter cpu,$(ACCELERATOR)),CUDA_VISIBLE_DEVICES= )$(PY) -m trainer
STAMPS := $(VENV)/.stamps
LISTS := bootstrap trainer-cpu trainer-gpu infra doctor managed test lint
# Clouds' SDKs are large: they are installed once there is something that imports them.
INFRA := $(if $(wildcard infra/__init__.py workloads/__init__.py),infra doctor managed)

.DEFAULT_GOAL := help
# Installs write to one .venv, and each of them is parallel inside; `make -j2 lint test` must not run two at once.
.NOTPARALLEL:
.PHONY: help quickstart test test-cluster test-engine test-engine-full test-node node-up node-down node-packages soak lint format bench lock clean venv supported-cpu supported-gpu $(addprefix install-,$(LISTS))
export PYTHON

##@ Use
quickstart: install-trainer-$(ACCELERATOR) ## Install the trainer and train a sharded DLRM on all GPUs, or on two CPU processes
	@$(TRAINER) launch --nproc $(PROCESSES) $(QUICKSTART_ARGS)

bench: install-trainer-$(ACCELERATOR) ## Measure training speed beside the stock TorchRec step
	@$(TRAINER) bench $(BENCH_ARGS)

install-managed: ## Add the clients of Vertex AI and Azure ML, for job.launcher vertex and azureml

##@ Develop
test: install-trainer-$(ACCELERATOR) $(addprefix install-,$(INFRA)) install-test ## Install what the tests need and run them (PYTEST_ARGS='-k name')
	@$(PY) -m pytest $(PYTEST_ARGS)

test-cluster: install-trainer-$(ACCELERATOR) install-infra install-test ## Run jobs on a real Kubernetes control plane, built once with Go (15 min)
	@$(PY) -m pytest tests/cluster $(PYTEST_ARGS)

test-engine: install-infra install-test ## Run every stack by the real Pulumi engine on simulated clouds (5 to 10 min)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pytest tests/engine $(PYTEST_ARGS)

test-engine-full: install-infra install-test ## The same, with a failure at every single create (half an hour)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" ENGINE_FULL=1 $(PY) -m pytest tests/engine $(PYTEST_ARGS)

test-node: install-trainer-$(ACCELERATOR) install-infra install-test ## Run the image on a real node: the whole chain, with faults (root; 25 to 40 min)
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pytest tests/node $(PYTEST_ARGS)

node-up: install-test ## Start a Kubernetes node of containers on this machine (root, Linux) and print its kubeconfig
	@$(PY) tests/node/node.py up

node-down: install-test ## Remove that node and all that is its, also one that was killed
	@$(PY) tests/node/node.py down

node-packages: install-test ## Install what a node needs of Debian's or Ubuntu's packages (root)
	apt-get update && apt-get install --yes --no-install-recommends $$($(PY) tests/node/node_build.py)

soak: install-trainer-$(ACCELERATOR) install-test ## Kill training runs SOAK_KILLS times (100) and print what that cost
	@$(PY) tests/trainer/faults/soak.py $(SOAK_KILLS)

lint: install-trainer-$(ACCELERATOR) $(addprefix install-,$(INFRA)) install-test install-lint ## Check style, formatting, types and the Dockerfile
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(if $(PACKAGES),$(PY) -m mypy --strict $(PACKAGES),echo "mypy: no package to check yet")
	@$(VENV)/bin/hadolint trainer/Dockerfile

format: install-lint ## Rewrite the code in the project's style
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean: ## Remove .venv and caches; runs/ and data/ stay
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

##@ Maintain
lock: install-bootstrap ## Recompile requirements-*.txt from pyproject.toml (UPGRADE=1 takes the newest versions)
	@rm -rf $(LOCK); mkdir -p $(LOCK)
	@# The present pins are preferences, so that a lock changes no more than it must.
	@if [ -n "$(UPGRADE)" ]; then : > $(LOCK)/all.txt; else cat requirements-*.txt > $(LOCK)/all.txt; fi
	@# All extras at once first: that fixes one version of each package, which every list then takes over.
	@$(COMPILE) --all-extras --output-file $(LOCK)/all.txt > /dev/null
	$(call compile,bootstrap,bootstrap)
	$(call compile,trainer-cpu,trainer trainer-cpu,fbgemm-gpu $(CUDA_ONLY))
	$(call compile,trainer-gpu,trainer trainer-gpu)
	$(call compile,infra,infra)
	$(call compile,doctor,doctor)
	$(call compile,managed,managed)
	$(call compile,test,test)
	$(call compile,lint,lint)
	@mv $(LOCK)/requirements-*.txt .

help: ## List the commands
	@echo "usage: make COMMAND"
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-18s%s\n", $$1, $$2 }' Makefile
	@echo
	@echo "settings: PYTHON=python3.12  ACCELERATOR=cpu|gpu  PROCESSES=N  PYTEST_ARGS=..."

# ---- The virtual environment

# A .venv that was made completely, still runs and is of the version that PYTHON names is kept. Otherwise the first legal
# Python makes a new one: `python3` where it will do, as that is what a person typing it would get.
venv:
	@legal='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'; \
	version='import sys; print("%d.%d.%d" % sys.version_info[:3])'; \
	fail() { echo "error: $$*" >&2; exit 2; }; \
	if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; \
	elif [ -e $(STAMPS)/venv ] && $(PY) -c '' 2> /dev/null; then exit 0; \
	else set -- python3 python3.13 python3.12 python3.11 python3.14 python; fi; \
	python=; seen=; \
	for candidate in "$$@"; do \
		found=$$("$$candidate" -c "$$version" 2> /dev/null) || continue; \
		seen="$$seen $$candidate is $$found,"; \
		if "$$candidate" -c "$$legal"; then python=$$candidate; break; fi; \
	done; \
	seen=$${seen# }; [ -n "$$python" ] || fail "$${seen:-no Python found ($$*),} but Python 3.11 to 3.14 is needed:" \
		"install one, or name it with make PYTHON=/path/to/python3.12"; \
	if [ -e $(STAMPS)/venv ] && [ "$$($(PY) -c "$$version" 2> /dev/null)" = "$$found" ]; then exit 0; fi; \
	"$$python" -c 'import ensurepip, venv' 2> /dev/null || fail "$$python ($$found) has no venv module:" \
		"install it (Debian and Ubuntu: apt install python$${found%.*}-venv), or name another with make PYTHON=..."; \
	echo "Making $(VENV) with $$python ($$found)"; \
	rm -rf $(VENV) && "$$python" -m venv $(VENV) && mkdir $(STAMPS) && : > $(STAMPS)/venv

install-bootstrap: venv
	@sum=$$(cksum < requirements-bootstrap.txt); \
	if [ "$$sum" != "$$(cat $(STAMPS)/bootstrap 2> /dev/null)" ] || ! $(UV) --version > /dev/null 2>&1; then \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --force-reinstall \
			--requirement requirements-bootstrap.txt && echo "$$sum" > $(STAMPS)/bootstrap; \
	fi

# A stamp holds the checksum of the list it stands for, and is empty while an install is under way: an empty one means that
# the last install was cut off, perhaps within a package, so all of the list is laid anew (from uv's cache: seconds).
# A full stamp is believed only if uv finds every package of the list in place.
UV_PIP = $(UV) pip install --python $(PY) --no-deps --require-hashes
define install
	@list=requirements-$(1).txt; stamp=$(STAMPS)/$(1); sum=$$(cksum < $$list); reinstall=; \
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

# Say at once where fbgemm has no wheel, instead of failing in the middle of an install.
supported-cpu: platforms = "Linux x86_64" | "Linux aarch64"
supported-cpu: advice = it has some for Linux on x86_64 and aarch64, so use a container or a remote machine
supported-gpu: platforms = "Linux x86_64"
supported-gpu: advice = ACCELERATOR=cpu leaves the GPUs alone
supported-cpu supported-gpu: supported-%:
	@case "$$(uname -s) $$(uname -m)" in $(platforms)) ;; *) \
		echo "error: fbgemm has no $* wheel for $$(uname -s) on $$(uname -m); $(advice)" >&2; exit 2 ;; esac

# Both builds of fbgemm own the same files, so the one must be gone before the other comes.
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
	@echo "error: ACCELERATOR is '$*', legal are cpu and gpu" >&2; exit 2

install-infra install-doctor install-managed install-test install-lint: install-%: install-bootstrap
	$(call install,$*)

# ---- Lists of pinned dependencies

LOCK := .cache/lock
COMPILE = $(UV) pip compile pyproject.toml --quiet --universal --python-version 3.11 --fork-strategy fewest \
	--no-annotate --no-header --no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade)

# torch links against most of CUDA even where there is no GPU. These are the parts that it only loads for work on a GPU:
# torch, torchrec, fbgemm, gloo, torch.compile on CPU and the profiler run without them, with 0.5 GB less to download and
# 1.2 GB less on disk. The rest are NEEDED entries of libtorch_cuda.so, without which `import torch` fails.
CUDA_ONLY := triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cusolver nvidia-nvtx

# $(call compile,LIST,EXTRAS,LEFT OUT)
define compile
	@echo "Locking requirements-$(1).txt"
	@$(COMPILE) $(addprefix --extra ,$(2)) $(addprefix --no-emit-package ,$(3)) --generate-hashes \
		--constraints $(LOCK)/all.txt --output-file $(LOCK)/requirements-$(1).txt > /dev/null
	@{ echo '# Compiled from pyproject.toml by `make lock`. Complete, so install it with --no-deps --require-hashes.'; \
		cat $(LOCK)/requirements-$(1).txt; } > $(LOCK)/list && mv $(LOCK)/list $(LOCK)/requirements-$(1).txt
endef
