"""OpenAI's API over the engine: `app.build` makes the ASGI application, `run.serve` runs it until it is stopped."""
