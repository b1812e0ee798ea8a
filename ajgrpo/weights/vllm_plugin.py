"""Makes a vLLM server know the host transport: ``--weight-transfer-config '{"backend": "host"}'``.

vLLM finds ``register`` through the entry point ``vllm.general_plugins``. The package is installed into the server's own
environment without its dependencies (``pip install --no-deps ajgrpo``): this module and ``vllm_engine``, which does the
work, need only what a vLLM server has.
"""

from __future__ import annotations

import logging

from ajgrpo.weights import base

logger = logging.getLogger("vllm.ajgrpo")


def register() -> None:
    """Adds the backend to vLLM. Called in every process of the server, perhaps more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(base.BACKEND, "ajgrpo.weights.vllm_engine", "HostEngine")
    except ValueError:
        logger.debug("the weight transfer backend %r is registered already", base.BACKEND)
