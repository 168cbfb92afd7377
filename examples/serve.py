"""Start a server and ask it as any server with OpenAI's API: a whole answer, then a stream.

python examples/serve.py     # needs: pip install openai
"""

import subprocess
import sys
import time
from urllib.request import urlopen

from openai import OpenAI

URL = "http://127.0.0.1:8000"

# In a terminal of its own: peagle serve smollm2-135m
server = subprocess.Popen([sys.executable, "-m", "peagle", "serve", "smollm2-135m", "--port=8000"])
try:
    while True:
        try:
            urlopen(f"{URL}/health")
            break
        except OSError:
            assert server.poll() is None, "the server did not start"
            time.sleep(0.5)

    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "Name a colour."}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=32)
    print(answer.choices[0].message.content)
    print(answer.usage.completion_tokens_details)  # draft tokens, accepted and rejected

    stream = client.chat.completions.create(model=model, messages=question, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
finally:
    server.terminate()  # running answers end first
    server.wait()
