# SPDX-License-Identifier: Apache-2.0
.PHONY: check format lint types test smoke

check: lint types test

lint:
	ruff check .
	ruff format --check .

format:
	ruff check --fix .
	ruff format .

types:
	pyright

test:
	pytest -q

smoke:
	pytest -q -m smoke
