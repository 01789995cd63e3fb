# The project's own commands. `make venv` is made by whatever needs it; no other step is needed.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv demo test test-slow test-all test-containers check format lock clean

venv: $(VENV)/.complete

# torch comes by itself: its wheel differs by machine (CPU or CUDA build), so it has no place in the
# hashed file; its version does. Some packages in that file ask for torch, hence --no-deps: the file is
# whole but for torch.
$(VENV)/.complete: requirements.txt requirements-torch.txt pyproject.toml
	@echo "Installing the packages of requirements.txt into $(VENV): some minutes, and quiet, the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes --no-deps \
	  -r requirements.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-torch.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

demo: venv
	$(BIN)/python examples/demo.py

# In two processes: half of the time goes by waiting. A file's tests stay together and in order.
test: venv
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile

# Those of more than ten seconds: kills, restarts, thousands of random inputs. One at a time; containers apart, below.
test-slow: venv
	$(BIN)/python -m pytest -m "slow and not gpu" --ignore tests/deploy/test_compose.py --durations=20 $(ARGS)

test-all: venv
	$(BIN)/python -m pytest -m "not gpu"

# Needs a container engine (DOCKER_HOST) and root: tests/deploy/test_compose.py says more.
test-containers: venv
	$(BIN)/python -m pytest -v --durations=0 tests/deploy/test_compose.py

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# New versions: resolve again, for every platform, with hashes and without addresses. The images take the
# same versions as the tests.
COMPILE := uv pip compile --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-header --no-annotate --upgrade
IMAGES := deploy/requirements
lock:
	$(COMPILE) --excludes requirements-torch.txt pyproject.toml --extra dev -o requirements.txt
	$(COMPILE) -c requirements.txt pyproject.toml --extra isal -o $(IMAGES)/client.txt
	$(COMPILE) -c requirements.txt pyproject.toml $(IMAGES)/service.in --extra service --extra fast -o $(IMAGES)/service.txt
	$(COMPILE) -c requirements.txt pyproject.toml $(IMAGES)/demo.in -o $(IMAGES)/demo.txt
	$(COMPILE) $(IMAGES)/build.in -o $(IMAGES)/build.txt

clean:
	rm -rf $(VENV) .demo build dist
