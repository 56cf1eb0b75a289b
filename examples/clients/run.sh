#!/bin/sh
# Runs clients that others wrote against a running server, each in a pinned environment of its own under CLIENTS.
#
#     sh examples/clients/run.sh                                          all but open_webui, which is 7 GB
#     sh examples/clients/run.sh langchain codex                          some
#
# URL (http://127.0.0.1:8000), MODEL (smollm2), TOKENIZER (its folder), AGENT_MODEL (long: what long_model.py makes),
# CLIENTS (a new folder).
# Such a server:  .venv/bin/python examples/clients/long_model.py long && make serve MODELS="smollm2 long"
# The output says which client failed, and the exit status is 1 if one did.
set -u
here=$(cd "$(dirname "$0")" && pwd)
URL=${URL:-http://127.0.0.1:8000}
MODEL=${MODEL:-smollm2}
TOKENIZER=${TOKENIZER:-$here/../../.cache/models/smollm2}
AGENT_MODEL=${AGENT_MODEL:-long}
CLIENTS=${CLIENTS:-$(mktemp -d)}
export URL MODEL AGENT_MODEL
# A broken environment installs nothing into the system's Python.
export PIP_REQUIRE_VIRTUALENV=1
# What is read and written of a home folder is the clients' own.
export HOME="$CLIENTS/home" HF_HUB_OFFLINE=1 HF_HOME="$CLIENTS/home/hf"
mkdir -p "$HOME" "$CLIENTS/work"

pip_install() {  # NAME PACKAGE...
    venv="$CLIENTS/$1"
    shift
    [ -f "$venv/pyvenv.cfg" ] || python3 -m venv "$venv" || return 1
    "$venv/bin/pip" install -q --disable-pip-version-check "$@"
}

npm_install() {  # NAME PACKAGE
    mkdir -p "$CLIENTS/$1"
    npm install --silent --no-audit --no-fund --prefix "$CLIENTS/$1" "$2"
}

langchain() {
    pip_install langchain langchain-openai==1.7.4 langchain-anthropic==1.7.10 &&
        "$CLIENTS/langchain/bin/python" "$here/langchain_client.py"
}

agents() {
    pip_install agents openai-agents==0.24.0 && "$CLIENTS/agents/bin/python" "$here/agents_client.py"
}

litellm() {
    pip_install litellm 'litellm[proxy]==1.108.7' && "$CLIENTS/litellm/bin/python" "$here/litellm_client.py"
}

lm_eval() {
    pip_install lm_eval 'lm_eval[api]==0.4.13' transformers==5.24.0 || return 1
    (cd "$here/lm_eval_task" && "$CLIENTS/lm_eval/bin/lm_eval" --model local-completions --include_path . --tasks cities,say \
        --model_args "model=$MODEL,base_url=$URL/v1/completions,tokenizer=$TOKENIZER,num_concurrent=2") &&
        (cd "$here/lm_eval_task" && "$CLIENTS/lm_eval/bin/lm_eval" --model local-chat-completions --apply_chat_template \
            --include_path . --tasks say --model_args "model=$MODEL,base_url=$URL/v1/chat/completions,num_concurrent=2")
}

smg() {
    pip_install smg smg==1.13.0 httpx && "$CLIENTS/smg/bin/python" "$here/smg_client.py"
}

open_webui() {
    pip_install open_webui open-webui==0.12.4 && "$CLIENTS/open_webui/bin/python" "$here/open_webui_client.py"
}

comply() {
    pip_install comply llm-comply==0.5.0 &&
        for form in open-responses openai-chat anthropic; do
            # Images are not served, and nothing is stored or compacted.
            tests=$("$CLIENTS/comply/bin/llm-comply" --list --format $form | grep -oE '^ *[a-z][a-z-]+' |
                grep -vE 'image|compact|reasoning-summary|thinking-display' | tr -d ' ' | paste -sd, -)
            "$CLIENTS/comply/bin/llm-comply" run --format $form -u "$URL/v1" -k none -m "$MODEL" --timeout 600 -f "$tests" || return 1
        done
}

codex() {
    npm_install codex @openai/codex@0.169.0 && mkdir -p "$HOME/.codex" || return 1
    cat >"$HOME/.codex/config.toml" <<EOF
model = "$AGENT_MODEL"
model_provider = "prism"
model_context_window = 49152
web_search = "disabled"
[agents]
enabled = false
[model_providers.prism]
name = "Prism"
base_url = "$URL/v1"
wire_api = "responses"
EOF
    (cd "$CLIENTS/work" && "$CLIENTS/codex/node_modules/.bin/codex" exec --skip-git-repo-check 'Say hello.' </dev/null)
}

claude() {
    npm_install claude @anthropic-ai/claude-code@2.1.328 || return 1
    node "$CLIENTS/claude/node_modules/@anthropic-ai/claude-code/install.cjs" || return 1
    (cd "$CLIENTS/work" && ANTHROPIC_BASE_URL="$URL" ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL="$AGENT_MODEL" \
        ANTHROPIC_SMALL_FAST_MODEL="$AGENT_MODEL" CLAUDE_CODE_MAX_OUTPUT_TOKENS=8192 \
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 \
        "$CLIENTS/claude/node_modules/.bin/claude" -p 'Say hello.' --tools Bash </dev/null)
}

opencode() {
    npm_install opencode opencode-ai@1.18.33 || return 1
    (cd "$CLIENTS/opencode/node_modules/opencode-ai" && node postinstall.mjs) || return 1
    cat >"$CLIENTS/work/opencode.json" <<EOF
{"provider": {"prism": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$URL/v1"},
  "models": {"$AGENT_MODEL": {"limit": {"context": 49152, "output": 64}}}}},
 "model": "prism/$AGENT_MODEL", "small_model": "prism/$AGENT_MODEL"}
EOF
    (cd "$CLIENTS/work" && "$CLIENTS/opencode/node_modules/.bin/opencode" run 'Say hello.' </dev/null)
}

failed=
for client in ${*:-comply langchain agents litellm lm_eval smg codex claude opencode}; do
    echo "== $client"
    $client || failed="$failed $client"
done
[ -z "$failed" ] || { echo "failed:$failed" && exit 1; }
echo "all passed"
