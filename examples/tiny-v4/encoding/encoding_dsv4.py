"""Fixed texts of tiny-v4's chat format.

Data only: Rewright reads these three string literals from the syntax tree and never runs the file.
A released DeepSeek-V4 defines the same names, with its own texts, in the same place.
"""

TOOLS_TEMPLATE = """# Functions

Each line describes one function that you may call:
{tool_schemas}

To call some of them, finish the reply with an empty line and then this block. An argument that is a
text is marked "true" and stands as it is; any other argument is marked "false" and is JSON.

<{dsml_token}tool_calls>
<{dsml_token}invoke name="FUNCTION">
<{dsml_token}parameter name="ARGUMENT" string="true">some text</{dsml_token}parameter>
<{dsml_token}parameter name="ARGUMENT" string="false">[1, 2]</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}tool_calls>

Thoughts opened by {thinking_start_token} are closed by {thinking_end_token} before anything else is said.
"""

REASONING_EFFORT_MAX = "Take as long as you like: work slowly, and try every answer before giving it.\n\n"

response_format_template = (
    "# Form of the answer\n\nAnswer in JSON that fits this schema, and in nothing else:\n{schema}"
)
