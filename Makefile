# Everything is set up on first use: tox in .venv-tox, one environment per task in .tox.
PYTHON ?= python3
# Those that take longest first.
FRAMEWORK ?= torch,tensorflow,jax,mxnet,core,paddle,example
# Environments of `make test-all` alone.
NIGHTLY ?= compiled-for-cuda,demo,docs-test,ecosystem,ecosystem-images,ecosystem-jax,ecosystem-tensorflow,trainers,watch
VERSIONS ?= jax-lowest,jax-newest,mxnet-lowest,mxnet-newest,paddle-lowest,paddle-newest,tensorflow-lowest,tensorflow-newest,torch-lowest,torch-newest
# The CPU that `make weakest` pretends to have: oneDNN uses no instruction beyond these.
WEAKEST ?= AVX2
CPUINFO = /proc/cpuinfo
BEYOND_AVX2 = \b(avx512|avx_vnni|avx_ne_convert|avx10|amx_)
WEAKEST_ENVIRONMENTS = weakest-tensorflow weakest-mxnet weakest-torch weakest-paddle
BENCH ?= torch,tensorflow,mxnet,paddle,jax
BENCHES = $$(echo $(BENCH) | sed "s/[^,]*/bench-&/g")
COMMA = ,
TOX = .venv-tox/bin/tox run
# Two environments at a time.
TOX_TWO = .venv-tox/bin/tox run-parallel --parallel 2 --parallel-no-spinner

.PHONY: demo test test-all weakest $(WEAKEST_ENVIRONMENTS) evidence table checks lint types docs docs-test versions bench gpu clean

demo: .venv-tox/bin/tox ; $(TOX) -e demo
test: .venv-tox/bin/tox ; $(TOX_TWO) -e $(FRAMEWORK)
# Longer fuzzing, all trainings of all programs, what needs more installed, and each part of the benchmarks once, in its smallest
# form; the workflow runs it every night.
test-all: .venv-tox/bin/tox ; AMPX_TEST_ALL=1 TINY=1 PYTEST_TIMEOUT=3600 $(TOX_TWO) -e $(FRAMEWORK),$(NIGHTLY),$(BENCHES)
# What computes in float16 depends on the CPU's instructions; these tests must not. Two environments at a time.
# A CPU that has AVX2 and nothing beyond it has nothing to hide: there these tests would be the same again that `make test` runs.
weakest: .venv-tox/bin/tox
	@if [ "$(WEAKEST)" = AVX2 ] && grep -qw avx2 $(CPUINFO) && ! grep -qE '$(BEYOND_AVX2)' $(CPUINFO); then \
	  echo "weakest: this CPU has no instruction beyond AVX2, so make test runs these tests as on the weakest"; \
	else $(TOX_TWO) --notest -e torch,tensorflow,mxnet,paddle && $(MAKE) -k -j2 $(WEAKEST_ENVIRONMENTS); fi
# Neither what starts several processes, nor what is interrupted: which lines run does not depend on the CPU.
NOT_WEAK = not Interrupt and not rank and not worker and not replicas and not ddp and not compiled
WEAK = DNNL_MAX_CPU_ISA=$(WEAKEST) ONEDNN_MAX_CPU_ISA=$(WEAKEST) $(TOX) --skip-pkg-install
weakest-torch:
	$(WEAK) -e torch -- -m "not gpu and not slow" -k "(float16 or half or lstm) and not programs and not aside and $(NOT_WEAK)" tests/conformance/test_torch.py tests/torch
# Of the kit, the tests in which something is computed in low precision; the protocol's steps of plain variables are float32.
WEAK_KIT = cast or region or dtype or low_precision or float32 or half or promote or module or replay or watch or weight \
	or readings or operations or simulated or norm or outputs or last_pattern or describes or op_lists or levels or plain_loop
weakest-tensorflow:
	$(WEAK) -e tensorflow -- -m "not gpu and not slow" -k "(float16 and not native or (Tape and ($(WEAK_KIT)))) and $(NOT_WEAK)" tests/conformance/test_tensorflow.py tests/tensorflow
weakest-mxnet:
	$(WEAK) -e mxnet -- -m "not gpu and not slow" -k "not Fuzz and not diagnosis and $(NOT_WEAK)" tests/conformance/test_mxnet.py tests/mxnet
weakest-paddle:
	$(WEAK) -e paddle -- -m "not gpu and not slow" -k "(float16 or recipe or static_programs) and $(NOT_WEAK)" tests/conformance/test_paddle.py tests/paddle
# The core and the example have none. No test that is left to `make test-all` shows a cell that others do not show.
evidence: .venv-tox/bin/tox ; for name in $(filter-out core example,$(subst $(COMMA), ,$(FRAMEWORK))); do $(TOX) -e $$name -- --regenerate tests/conformance/test_$$name.py tests/$$name || exit 1; done
table: .venv-tox/bin/tox ; $(TOX) -e table
# Lint, types and manual: what stands beside the tests. Those of the command line train the demo for an epoch.
checks: .venv-tox/bin/tox ; $(TOX_TWO) -e types,docs,lint
lint: .venv-tox/bin/tox ; $(TOX) -e lint
types: .venv-tox/bin/tox ; $(TOX) -e types
docs: .venv-tox/bin/tox ; $(TOX) -e docs
# In a real browser, which is installed as a wheel.
docs-test: .venv-tox/bin/tox ; $(TOX) -e docs-test
# The oldest and the newest versions, installed anew: the newest are what pip finds today. They need Python 3.10 to 3.13; where one
# is missing, its environments are skipped. PyTorch's wheels of the index bring gigabytes of CUDA with them.
versions: .venv-tox/bin/tox ; $(TOX) --recreate -e $(VERSIONS)
bench: .venv-tox/bin/tox ; $(TOX) -e $(BENCHES)
gpu: ; PYTHONPATH=.:backends $(PYTHON) benchmarks/gpu.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(QUICK),--quick) $(if $(JSON),--out $(JSON))
clean: ; rm -rf .venv-tox .tox .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo-out docs/_build

.venv-tox/bin/tox: ; $(PYTHON) -m venv .venv-tox && .venv-tox/bin/python -m pip install --quiet "tox>=4.44"
