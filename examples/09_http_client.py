"""Streams a chat from a running ``actorpp run``, with OpenAI's own client: python 09_http_client.py http://…"""

import sys

from openai import OpenAI

address, question = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "Why is the sky blue?"

with OpenAI(base_url=f"{address}/v1", api_key="none") as client:
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_progress": True},  # ours: how far the prompt is, worth having when it is long
    )
    for chunk in stream:
        if progress := (chunk.model_extra or {}).get("prompt_progress"):
            print("prompt: {processed} of {total} tokens".format(**progress), file=sys.stderr)
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens", file=sys.stderr)
