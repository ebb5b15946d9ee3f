"""The HTTP application: OpenAI-compatible routes over an engine, written with aserve's public names alone.

`create_app(engine)` is a Starlette application to serve or to mount; aserve/cli.py and users' programs call it.
"""

from routes.app import create_app

__all__ = ["create_app"]
