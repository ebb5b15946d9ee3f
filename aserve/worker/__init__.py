"""The model thread's side of a step: inputs, forward, draw, KV pools. No asyncio; the engine never imports it."""
