"""The OpenAI-compatible HTTP front door: FastAPI on uvicorn, in the driver's own loop, thin over the Gateway."""
