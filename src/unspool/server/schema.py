"""The bodies that endpoints accept: for every field of OpenAI's and Anthropic's schemas, whether it is honoured."""

from __future__ import annotations

from unspool.server import engines
from unspool.server import fields as f
from unspool.server.kinds import (
    Schema,
    any_of,
    array,
    flag,
    inert,
    integer,
    mapping,
    only,
    record,
    refused,
    refused_types,
    string,
    word,
)  # fmt: skip

STREAM: dict[str, Schema] = {
    "stream": flag(description="Send the answer as it comes, by server-sent events."),
    "stream_options": record(
        {
            "include_usage": flag(description="A last chunk with the usage."),
            "continuous_usage_stats": flag(description="The usage so far in every chunk."),
            "include_obfuscation": inert(only(False, description="nothing is padded")),
        }
    ),
}

# Prompts ------------------------------------------------------------------------------------------------------------
PROMPT = any_of(
    string(),
    array(any_of(string(), integer(0), array(f.TOKEN_ID, least=1)), least=1),
    description="A text, token ids, or a list of either.",
)

# Chat ---------------------------------------------------------------------------------------------------------------
TEXT = any_of(string(), array(f.CONTENT_PART, least=1))
CALL = record(
    {
        "id": string(),
        "index": inert(integer(0)),  # left by clients that joined a stream
        "type": only("function"),
        "function": record({"name": f.NAME, "arguments": string()}, required=("name", "arguments")),
    },
    required=("function",),
)
_SPEAKER = {
    "content": TEXT,
    "name": string(description="Shown to the model where its template has a place for names; else a warning says so."),
}
MESSAGE = any_of(
    record({"role": word("system", "developer"), **_SPEAKER}, required=("role", "content")),
    record({"role": only("user"), **_SPEAKER}, required=("role", "content")),
    record(
        {
            "role": only("assistant"),
            **_SPEAKER,
            "tool_calls": array(CALL),
            "reasoning_content": string(description="Shown to the model where its template shows reasoning."),
            "reasoning": string(description="Another name of reasoning_content."),
            "token_ids": array(
                f.TOKEN_ID, description="Of the last message: what the model wrote, to be continued as it is."
            ),
            "annotations": inert(array({})),
            "refusal": refused("no model here refuses apart from its text"),
            "audio": refused("text only"),
            "function_call": refused("replaced by tool_calls"),
        },
        required=("role",),
    ),
    record(
        {"role": only("tool"), "content": TEXT, "tool_call_id": string(), "name": inert(string())},
        required=("role", "content"),
    ),
    tag="role",
)
TOOL = record(
    {"type": only("function"), "function": record(f.FUNCTION, required=("name",))}, required=("type", "function")
)
_FUNCTION_NAME = record(
    {"type": only("function"), "function": record({"name": f.NAME}, required=("name",))}, required=("type", "function")
)
TOOL_CHOICE = any_of(
    word("auto", "none", "required"),
    _FUNCTION_NAME,
    record(
        {
            "type": only("allowed_tools"),
            "allowed_tools": record(
                {"mode": word("auto", "required"), "tools": array(_FUNCTION_NAME, least=1, most=f.MAX_TOOLS)},
                required=("mode", "tools"),
            ),
        },
        required=("type", "allowed_tools"),
    ),
    tag="type",
)
RESPONSE_FORMAT = any_of(
    record({"type": only("text")}, required=("type",)),
    record(
        {"type": only("json_object"), "schema": {**f.JSON_SCHEMA, "description": "llama.cpp's: what the answer fits."}},
        required=("type",),
    ),
    record(
        {
            "type": only("json_schema"),
            "json_schema": record(f.FORMAT),
            "schema": {**f.JSON_SCHEMA, "description": "llama.cpp's: in place of json_schema."},
        },
        required=("type",),
    ),
    tag="type",
)
EFFORT = word("none", "minimal", "low", "medium", "high", "xhigh", "max")
TEMPLATE: dict[str, Schema] = {
    "chat_template_kwargs": mapping(maxProperties=64, description="Variables of the model's chat template."),
    "enable_thinking": flag(description="Whether the model thinks before it answers, where its template lets choose."),
}
CONTINUING: dict[str, Schema] = {
    "add_generation_prompt": flag(
        description="Begin a new answer (true unless the last message is the assistant's); false: end the prompt with "
        "the last message."
    ),
    "continue_final_message": flag(
        description="Go on with the last message, the assistant's. Where neither field is given, such a message is "
        "continued."
    ),
}
CHAT = record(
    {
        "messages": array(MESSAGE, least=1, most=f.MAX_MESSAGES),
        **f.MODEL,
        **STREAM,
        **f.SAMPLING,
        "max_completion_tokens": integer(0, description="Without it, an answer may fill the context."),
        "max_tokens": integer(0, description="The older name of max_completion_tokens."),
        "logprobs": flag(),
        "top_logprobs": integer(0, f.MAX_TOP),
        "response_format": RESPONSE_FORMAT,
        "tools": array(TOOL, most=f.MAX_TOOLS),
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": flag(),
        "modalities": array(word("text"), least=1, most=1, description="Text only."),
        **TEMPLATE,
        **CONTINUING,
        "reasoning_effort": {
            **EFFORT,
            "description": "How much to think: the template's variable of that name; else `none` turns thinking off "
            "and all others turn it on.",
        },
        **engines.FOR_CHAT,
        **f.INERT,
        "functions": refused("replaced by tools"),
        "function_call": refused("replaced by tool_choice"),
        "audio": refused("text only"),
        "prediction": refused("a prediction would not be used"),
        "verbosity": refused("no model here knows it"),
        "web_search_options": refused("there is no web search here"),
        "moderation": refused("there is no moderation here"),
    },
    required=("messages",),
)

# Completions --------------------------------------------------------------------------------------------------------
COMPLETIONS = record(
    {
        "prompt": PROMPT,
        **f.MODEL,
        **STREAM,
        **f.SAMPLING,
        "max_tokens": integer(0, description="16 when absent, as in OpenAI's."),
        "logprobs": integer(0, f.MAX_TOP),
        "echo": flag(description="Begin with the prompt; with logprobs, its logprobs too."),
        "prompt_logprobs": integer(0, f.MAX_TOP),
        "response_format": RESPONSE_FORMAT,
        **engines.FOR_COMPLETIONS,
        **{name: f.INERT[name] for name in ("user", "safety_identifier", "metadata")},
        "suffix": refused("no model here fills in the middle"),
    },
    required=("prompt",),
)

NAMED_MODEL = record({"model": string(description="The name or an alias of a served model.")}, required=("model",))

# Responses ----------------------------------------------------------------------------------------------------------
# Clients send items back with every field that they were given.
_ITEM = {"id": inert(string()), "status": inert(string())}
_CALL_ITEM = {**_ITEM, "caller": inert(mapping()), "async": inert(only(False)), "namespace": inert(string())}
_ITEM_PARTS = array(
    any_of(
        record(
            {
                "type": word("input_text", "output_text"),
                "text": string(),
                "annotations": inert(array({})),
                "logprobs": inert(array({})),
            },
            required=("type", "text"),
        ),
        refused_types("input_image", "image_url", why=f.NO_IMAGES),
        refused_types("input_audio", why=f.NO_AUDIO),
        refused_types("input_file", why=f.NO_FILES),
        tag="type",
    ),
    least=1,
)
INPUT_ITEM = any_of(
    record(
        {
            "type": only("message"),
            "role": word("user", "assistant", "system", "developer"),
            "content": any_of(string(), _ITEM_PARTS),
            "phase": inert(word("commentary", "final_answer")),
            **_ITEM,
        },
        required=("role", "content"),
    ),
    record(
        {"type": only("function_call"), "call_id": string(), "name": f.NAME, "arguments": string(), **_CALL_ITEM},
        required=("type", "call_id", "name", "arguments"),
    ),
    record(
        {
            "type": only("reasoning"),
            "content": array(record({"type": only("reasoning_text"), "text": string()}, required=("type", "text"))),
            "summary": inert(array({})),
            "encrypted_content": refused("it was made by another server, and cannot be read here"),
            **_ITEM,
        },
        required=("type",),
    ),
    record(
        {
            "type": only("function_call_output"),
            "call_id": string(),
            "output": any_of(string(), _ITEM_PARTS),
            "caller": inert(mapping()),
            **_ITEM,
        },
        required=("type", "call_id", "output"),
    ),
    tag="type",
)
_NAMED_FUNCTION = record({"type": only("function"), "name": f.NAME}, required=("type", "name"))
RESPONSES = record(
    {
        "input": any_of(string(), array(INPUT_ITEM, least=1, most=f.MAX_MESSAGES)),
        "instructions": string(description="Put in front as the system's message."),
        **f.MODEL,
        "stream": STREAM["stream"],
        "stream_options": record(
            {"include_obfuscation": STREAM["stream_options"]["properties"]["include_obfuscation"]}
        ),
        **{name: field for name, field in f.SAMPLING.items() if name not in ("n", "best_of", "beam")},
        "max_output_tokens": integer(0),
        "top_logprobs": integer(0, f.MAX_TOP),
        "include": array(word("message.output_text.logprobs")),
        "text": record(
            {
                "format": any_of(
                    record({"type": only("text")}, required=("type",)),
                    record({"type": only("json_object")}, required=("type",)),
                    record({"type": only("json_schema"), **f.FORMAT}, required=("type", "name", "schema")),
                    tag="type",
                ),
                "verbosity": refused("no model here knows it"),
            }
        ),
        "tools": array(record({"type": only("function"), **f.FUNCTION}, required=("type", "name")), most=f.MAX_TOOLS),
        "tool_choice": any_of(
            word("auto", "none", "required"),
            _NAMED_FUNCTION,
            record(
                {
                    "type": only("allowed_tools"),
                    "mode": word("auto", "required"),
                    "tools": array(_NAMED_FUNCTION, least=1, most=f.MAX_TOOLS),
                },
                required=("type", "mode", "tools"),
            ),
            tag="type",
        ),
        "parallel_tool_calls": flag(),
        "truncation": only("disabled", description="a prompt that is too long is refused, never cut"),
        "background": inert(only(False, description="an answer is given while its caller waits")),
        **TEMPLATE,
        **f.INERT,
        "previous_response_id": refused("nothing is stored; send the conversation"),
        "conversation": refused("nothing is stored; send the conversation"),
        "prompt": refused("nothing is stored"),
        "reasoning": record(
            {
                "effort": EFFORT,
                "summary": refused("thinking is given as it is written, not summed up"),
                "generate_summary": refused("thinking is given as it is written, not summed up"),
            }
        ),
        "max_tool_calls": refused("it counts built-in tools, and there are none"),
        "context_management": refused("a prompt that is too long is refused, never cut"),
        "moderation": refused("there is no moderation here"),
        "image": refused("text only"),
        "access_programs": refused("there are none here"),
    },
    required=("input",),
)

# Anthropic's messages -----------------------------------------------------------------------------------------------
_CACHED = {"cache_control": inert(mapping())}
_BLOCK = record(
    {"type": only("text"), "text": string(), **_CACHED, "citations": refused("no citations here")}, ("type", "text")
)
_NO_FILE_BLOCKS = (
    refused_types("image", "image_url", why=f.NO_IMAGES),
    refused_types("document", "search_result", "container_upload", why=f.NO_FILES),
)
_BLOCKS = any_of(string(), array(any_of(_BLOCK, *_NO_FILE_BLOCKS, tag="type")))
_TOOL_BLOCK = {**_CACHED, "caller": inert(mapping()), "toolset_name": inert(string())}
CONTENT_BLOCK = any_of(
    _BLOCK,
    record(
        {"type": only("tool_use"), "id": string(), "name": f.NAME, "input": mapping(), **_TOOL_BLOCK},
        required=("type", "id", "name", "input"),
    ),
    record(
        {
            "type": only("tool_result"),
            "tool_use_id": string(),
            "content": _BLOCKS,
            "is_error": flag(description="Told to the model in front of the content."),
            **_TOOL_BLOCK,
        },
        required=("type", "tool_use_id"),
    ),
    record(
        {"type": only("thinking"), "thinking": string(), "signature": inert(string()), **_CACHED},
        required=("type", "thinking"),
    ),
    refused_types("redacted_thinking", why="it was made by another server, and cannot be read here"),
    *_NO_FILE_BLOCKS,
    tag="type",
)
_CONVERSATION: dict[str, Schema] = {
    **f.MODEL,
    "messages": array(
        record(
            {"role": word("user", "assistant"), "content": any_of(string(), array(CONTENT_BLOCK, least=1))},
            required=("role", "content"),
        ),
        least=1,
        most=f.MAX_MESSAGES,
    ),
    "system": _BLOCKS,
    "tools": array(
        record(
            {
                "type": only("custom"),
                "name": f.NAME,
                "description": string(),
                "input_schema": f.JSON_SCHEMA,
                "strict": f.FUNCTION["strict"],
                **_CACHED,
            },
            required=("name", "input_schema"),
        ),
        most=f.MAX_TOOLS,
    ),
    "tool_choice": any_of(
        record({"type": word("auto", "any"), "disable_parallel_tool_use": flag()}, required=("type",)),
        record({"type": only("none")}, required=("type",)),
        record({"type": only("tool"), "name": f.NAME, "disable_parallel_tool_use": flag()}, ("type", "name")),
        tag="type",
    ),
    "thinking": any_of(
        record({"type": only("disabled")}, required=("type",)),
        record(
            {
                "type": only("enabled"),
                "budget_tokens": integer(0, description="Thinking is closed after so many tokens."),
                "display": only("summarized", description="thinking is given as it is written"),
            },
            required=("type",),
        ),
        record({"type": only("adaptive"), "display": only("summarized")}, required=("type",)),
        tag="type",
    ),
    **TEMPLATE,
    **_CACHED,
    **{name: inert(string()) for name in ("speed", "user_profile_id", "workspace_id")},
    "output_config": record(
        {
            "effort": EFFORT,
            "format": record({"type": only("json_schema"), "schema": f.JSON_SCHEMA}, required=("type", "schema")),
        }
    ),
}
MESSAGES = record(
    {
        **_CONVERSATION,
        "max_tokens": integer(0),
        "stream": STREAM["stream"],
        "stop_sequences": array(f.STRING, most=f.MAX_STOPS),
        **{name: field for name, field in f.SAMPLING.items() if name not in ("n", "best_of", "beam", "stop")},
        "metadata": inert(mapping(string())),
        "service_tier": inert(word("auto", "standard_only")),
        "container": refused("there are no containers here"),
        "mcp_servers": refused("no servers are called from here"),
        "context_management": refused("a prompt that is too long is refused, never cut"),
        "diagnostics": refused("every answer tells what was done for it"),
        "inference_geo": refused("there is one place here"),
    },
    required=("messages", "max_tokens"),
)
COUNT_TOKENS = record(_CONVERSATION, required=("messages",))

# The rest -----------------------------------------------------------------------------------------------------------
EMBEDDINGS = record(
    {
        "input": PROMPT,
        **f.MODEL,
        "encoding_format": word("float", "base64"),
        "dimensions": integer(1),
        "user": f.INERT["user"],
    },
    required=("input",),
)
TOKENIZE = record(
    {
        **f.MODEL,
        "prompt": string(description="Either this, or content, or messages."),
        "content": string(
            description="llama.cpp's: the prompt, without BOS unless add_special says so, control tokens read as such."
        ),
        "messages": array(MESSAGE, least=1, most=f.MAX_MESSAGES),
        "tools": array(TOOL, most=f.MAX_TOOLS),
        **CONTINUING,
        "add_special_tokens": flag(
            description="Put BOS in front where the model wants it (true for a prompt, false for messages when absent)."
        ),
        "parse_special": flag(
            description="With a prompt: read control tokens as such. When absent: where the prompt is one, and no more."
        ),
        "return_token_strs": flag(description="The text of each token too."),
        "add_special": flag(description="llama.cpp's: with content, put BOS in front (false when absent)."),
        "with_pieces": flag(
            description="llama.cpp's: with content, each token as {id, piece}; pieces that are no text are bytes."
        ),
        **TEMPLATE,
    }
)
DETOKENIZE = record(
    {**f.MODEL, "tokens": array(f.TOKEN_ID), "skip_special_tokens": flag(description="False when absent.")},
    required=("tokens",),
)
SCORE = record(
    {
        "input": PROMPT,
        **f.MODEL,
        "top_logprobs": integer(0, f.MAX_TOP, description="How many alternatives for each token."),
        "deadline_ms": f.EXTRA["deadline_ms"],
        "priority": f.EXTRA["priority"],
        "user": f.INERT["user"],
    },
    required=("input",),
)

# Answers with a given beginning ------------------------------------------------------------------------------------
_FORK: dict[str, Schema] = {
    "prompt": any_of(string(), array(f.TOKEN_ID, least=1), description="A text or token ids; either this or messages."),
    "messages": array(MESSAGE, least=1, most=f.MAX_MESSAGES),
    "is_chat": flag(description="With a prompt: it is a rendered conversation, so the answer is a text of its own."),
    **TEMPLATE,
    "output": array(f.TOKEN_ID, description="How the answer begins, as if these tokens had been chosen."),
    "output_text": string(description="Text that the answer goes on with, after the tokens in output."),
    **f.MODEL,
    **f.SAMPLING,
    "max_tokens": integer(0, description="Of the whole answer, what is given of it included."),
    "logprobs": integer(0, f.MAX_TOP),
}
FORK = record({**_FORK, "stream": STREAM["stream"]})
_OF_ANSWERS = ("n", "best_of", "beam", "trace", "logprobs")
WHATIF = record({name: field for name, field in _FORK.items() if name not in _OF_ANSWERS})
REPLAY = record(
    {
        **{name: field for name, field in _FORK.items() if name != "beam"},
        "crowd": integer(0, 64, description="How many random requests run in the same batch; 16 when absent."),
    }
)
