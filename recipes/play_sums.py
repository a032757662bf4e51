"""An agent harness at its smallest: reads its task, asks the model once, reports what the answer was worth.

Any program that speaks to an OpenAI-style endpoint can stand in its place; it gets OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import os
import sys
import urllib.request


def post(path: str, body: object) -> dict:
    """Send JSON to the endpoint, and read what it answers."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


task = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": task["prompt"]}]
answer = post("/chat/completions", {"model": "policy", "messages": messages})["choices"][0]["message"]["content"]
post("/reward", {"reward": float(answer.strip() == task["reference"])})
