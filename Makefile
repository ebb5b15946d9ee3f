# Two commands are enough: `make serve` and `make test`. Each installs what it needs into .venv first.
# ARGS passes options on: make serve ARGS="--port 9000", make test ARGS="-k scheduler".

.PHONY: help install serve test lint check size loadtest bench clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 12

install:  ## make .venv and install aserve with everything a contributor needs
	@scripts/install demo dev loadtest

serve:  ## serve the demo model on 127.0.0.1:8000
	@scripts/serve $(ARGS)

test:  ## run the tests
	@scripts/test $(ARGS)

lint:  ## format and lint, changing files
	@scripts/lint

check:  ## format, lint, types, import rules and size, changing nothing
	@scripts/check

size:  ## table of lines per file and longest function
	@scripts/size $(ARGS)

loadtest:  ## start a server, load it for a minute with locust, stop it
	@scripts/loadtest $(ARGS)

bench:  ## start a server, measure tokens/s and latency at 1 and 8 streams, stop it
	@scripts/bench $(ARGS)

clean:  ## remove .venv and everything built
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
