#!/bin/sh
# The routes by hand, against a running server: examples/curl.sh [URL]
set -eu
url=${1:-http://127.0.0.1:8000}
json='content-type: application/json'

echo '--- models'
curl -sSf "$url/v1/models"

echo; echo '--- a completion'
curl -sSf "$url/v1/completions" -H "$json" -d '{"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}'

echo; echo '--- the same, streamed: one server-sent event per piece of text, then [DONE]'
curl -sSfN "$url/v1/completions" -H "$json" \
    -d '{"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "stream": true}'

echo; echo '--- a chat turn, streamed'
curl -sSfN "$url/v1/chat/completions" -H "$json" \
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 48, "temperature": 0, "stream": true}'

echo; echo '--- a request that cannot be served: 400 and an error object, before any stream starts'
curl -sS "$url/v1/completions" -H "$json" -d '{"prompt": "Hello", "temperature": -1}'

echo; echo '--- health'
curl -sSf "$url/health"
echo
