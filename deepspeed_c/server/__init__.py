"""An HTTP server with the routes of OpenAI's API, over the ragged engine (docs/serving.md)."""
