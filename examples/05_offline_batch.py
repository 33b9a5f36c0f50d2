"""Many prompts at once, from plain Python: the embedded default model on two stage processes."""

from __future__ import annotations

from actorpp import LLM, SamplingParams

prompts = ["The capital of France is", "The opposite of hot is", "One, two, three,", "The sun rises in the"]

with LLM(stages=2) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        answer = output.outputs[0]
        print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason}, {output.metrics.e2e_s:.2f} s)")

    question = [{"role": "user", "content": "Name three colours."}]
    print(llm.chat(question, SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text)
