"""O03: a busy port is found before any weights are read."""

from __future__ import annotations

import pytest

from aserve import ConfigError, EngineConfig
from routes.server import bind, serve
from routes.server_options import ServerOptions


def test_a_busy_port_is_found_before_anything_is_loaded() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            serve(EngineConfig(model="/nonexistent"), ServerOptions(port=port))
    assert str(port) in caught.value.message
