"""The verb that answers over HTTP: serve."""

from __future__ import annotations

import importlib.util

from domext_ray.commands.job import Job
from domext_ray.config.serve import ServeConfig
from domext_ray.errors import ConfigError


def _serve(config: ServeConfig) -> None:
    from domext_ray.serving.serve import run_serving

    run_serving(config)


def _check_extra(config: ServeConfig) -> None:
    """Refuse to begin without Ray Serve's own requirements."""
    for name in ("fastapi", "uvicorn", "starlette"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'domext serve needs {name}, which is not installed: pip install "domext_ray[serve]".')


SERVE = Job(
    "serve",
    """Answer over HTTP with a bank's adapters: fill masks, classify, find entities, embed; a page at / shows them.

    domext serve --bank bank                                    # http://127.0.0.1:8000/, all adapters
    domext serve --bank bank --adapters clinic,law --replicas 2 --token_file token
    domext serve --bank bank --dry_run true                     # reads and checks all, starts nothing
    domext serve --model runs/clinic-ner                        # one model alone

Requests of different clients for different adapters share a pass through one encoder. Each text of a request may name
its own adapter, "__base__", or "auto" (the adapters' routers choose), and each answer says which it was. Adapters come
and go without a restart: POST and DELETE /v1/adapters. Requests show a token (Authorization: Bearer). /openapi.json
describes all endpoints, /metrics is Prometheus' own. Ctrl-C or SIGTERM: open requests are answered, then it ends.""",
    ServeConfig,
    _serve,
    main=(
        *("bank", "adapters", "model", "host", "port", "token_file", "replicas", "max_length", "limit.rate"),
        *("limit.queue", "scale.use_gpu", "scale.threads", "drain_seconds", "dry_run"),
    ),
    found=("bank", "base", "token_file"),
    check=_check_extra,
)
