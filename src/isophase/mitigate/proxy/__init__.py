"""An OpenAI-compatible proxy that protects any client: starlette, uvicorn and httpx2, no torch."""
