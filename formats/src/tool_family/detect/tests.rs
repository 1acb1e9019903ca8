//! What published templates write, cut down to what tells them apart: each is told as what it is, with
//! the marks of others nearby.

use super::{AnswerFrame, OutputStyle, ThinkingStyle, ToolFamily, style};

fn check(
    name: &str,
    template: &str,
    tools: impl Into<Option<ToolFamily>>,
    thinking: impl Into<Option<ThinkingStyle>>,
    answer: impl Into<Option<AnswerFrame>>,
) {
    let expected =
        OutputStyle { tools: tools.into(), thinking: thinking.into(), answer: answer.into() };
    assert_eq!(style(template), expected, "{name}");
}

#[test]
fn calls_in_tags_are_told_apart() {
    use ThinkingStyle::{HunyuanTags, SeedTags, ThinkTags};
    use ToolFamily::*;
    check("nothing", "{{ messages }}", None, None, None);
    check("Qwen 2.5", "<tool_call>\\n{\\\"name\\\": <function-name>", JsonTags, None, None);
    check("Qwen 3", "<tool_call>\\n{\"name\" <think> </think>", JsonTags, ThinkTags, None);
    check(
        "Qwen3-Coder",
        "<tool_call>\\n<function=example>\\n<parameter=p_1>\\nv\\n</parameter>",
        QwenXml,
        None,
        None,
    );
    check(
        "Nemotron 3, Step 3.5, MiMo V2 Flash",
        "<think></think> '<tool_call>\\n<function=' ~ name '<parameter=' ~ key",
        QwenXml,
        ThinkTags,
        None,
    );
    check(
        "Seed-OSS",
        "{%- set b = '<seed:think>' %}<seed:tool_call>\\n<function=f>\\n<parameter=p>v</parameter>",
        SeedXml,
        SeedTags,
        None,
    );
    check("GLM", "<tool_call>{function-name}<arg_key> <think>", Glm4, ThinkTags, None);
    check(
        "Hunyuan 3",
        "':opensource' '<think{}>'.format '<tool_calls{}>' '<tool_call{}>' '<tool_sep{}>' '<arg_key{}>'",
        HunyuanXml,
        HunyuanTags,
        None,
    );
    check(
        "MiniMax M2",
        "<minimax:tool_call> \\n<response></response> </think>",
        MinimaxM2,
        ThinkTags,
        None,
    );
    check("Hunyuan", "<tool_calls>[{\"name\": \"f\"}]</tool_calls>", ToolCallsJson, None, None);
    check(
        "Hunyuan A13B",
        "<|startoftext|> <|extra_0|> <tool_calls>[{\"name\" <think>\\n\\n</think>",
        ToolCallsJson,
        ThinkTags,
        AnswerFrame::AnswerTags,
    );
    check("Apriel", "<tool_calls>[<tool_call>", ToolCallsJson, None, None);
    check(
        "Nemotron Nano 2",
        "<TOOLCALL>[{\"name\"</TOOLCALL> <think>",
        NemotronJson,
        ThinkTags,
        None,
    );
    check("Nemotron Mini", "<toolcall> {\"name\"", NemotronTags, None, None);
    let longcat = "<longcat_tool_call>\n{\"name\": <function-name>";
    check("LongCat Flash Chat", longcat, LongcatJson, None, None);
    let thinks = format!("{longcat} <longcat_think>");
    check("LongCat Flash Thinking", &thinks, LongcatJson, ThinkingStyle::LongcatTags, None);
    check("OLMo 3", "<function_calls></function_calls> XML tags", Olmo3, None, None);
    check(
        "Ernie 4.5",
        "<tool_call>\\n{\"name\"\\n</think>\\n\\n<response>\\n ~ '</response>'",
        JsonTags,
        ThinkTags,
        AnswerFrame::ResponseTags,
    );
}

#[test]
fn calls_in_special_tokens_are_told_apart() {
    use ThinkingStyle::{BracketTags, Channels, InnerTags, ThinkTags, ThoughtChannel};
    use ToolFamily::*;
    check("Mistral Nemo", "[TOOL_CALLS] [", MistralJson, None, None);
    check("Ministral 3", "[TOOL_CALLS]' + name + '[ARGS] [THINK]", MistralNames, BracketTags, None);
    check("Llama 3", "<|start_header_id|> <|python_tag|> tool_calls", LlamaJson, None, None);
    check("Llama 4", "<|header_start|> tool_calls [func_name1(", LlamaPythonic, None, None);
    check("DeepSeek V3", "<｜tool▁calls▁begin｜>```json", DeepseekV3, None, None);
    check("DeepSeek V3.1", "<｜tool▁calls▁begin｜></think>", DeepseekV31, ThinkTags, None);
    check("DeepSeek V3.2", "<｜DSML｜function_calls>", DeepseekV32, None, None);
    check("as a variable", "'｜DSML｜' '<' + dsml + 'function_calls>'", DeepseekV32, None, None);
    check("DeepSeek V4", "'｜DSML｜' '<' + dsml + 'tool_calls>'", DeepseekV4, None, None);
    check("Kimi", "<|tool_calls_section_begin|><|tool_call_begin|>", KimiK2, None, None);
    check("gpt-oss", "<|channel|>analysis<|message|> functions.", Harmony, Channels, None);
    check(
        "Gemma 4",
        "'<|tool_call>call:' '<|channel>thought\\n' '<|think|>'",
        Gemma4,
        ThoughtChannel,
        None,
    );
    check("Apertus", "'<|tools_prefix|>' '<|inner_prefix|>'", ApertusJson, InnerTags, None);
    check(
        "Solar Open",
        "<|begin|>assistant<|think|> <|content|> <|end|> <|tool_calls|><|tool_call:begin|>",
        Solar,
        ThinkingStyle::SolarTurn,
        AnswerFrame::SolarTurns,
    );
    check("LFM2", "List of tools: <|tool_list_start|>[", Lfm2, None, None);
    check("LFM2.5", "List of tools: [ </think>", Lfm2, ThinkTags, None);
    check(
        "Command R7B",
        "<|START_THINKING|> <|START_ACTION|>[ {\"tool_name\" <|START_RESPONSE|>",
        CohereJson,
        ThinkingStyle::CohereTags,
        AnswerFrame::CohereResponse,
    );
    check(
        "HyperCLOVA X",
        "'<|im_start|>assistant/think\\n' '<|im_start|>assistant -> tool/function_call\\n['",
        HyperclovaJson,
        ThinkingStyle::HyperclovaTurn,
        AnswerFrame::HyperclovaTurns,
    );
    check("InternLM", "<|action_start|><|plugin|>\\n", InternlmJson, None, None);
    check(
        "Granite 3.3",
        "only with <|tool_call|> <think></think> and <response></response>",
        GraniteJson,
        ThinkTags,
        AnswerFrame::ResponseTags,
    );
}

#[test]
fn a_mark_before_every_tag_tells_more_than_the_tags() {
    use ToolFamily::MinimaxM3;
    check(
        "MiniMax M3",
        "']<]minimax[>[' '<tool_call>' '<invoke name=' <response> '<mm:think>' '</mm:think>' '</think>'",
        MinimaxM3,
        ThinkingStyle::MinimaxTags,
        None,
    );
}

/// Their marks are those of families above, but not their ways of writing.
#[test]
fn unknown_ways_are_not_taken_for_known_ones() {
    check(
        "functionary 3.1",
        "<|start_header_id|> '<function=' + name tool_calls",
        None,
        None,
        None,
    );
    check("functionary 3.2", "<|start_header_id|> '>>>' recipient tool_calls", None, None, None);
    check("firefunction", "<|start_header_id|> functools tool_calls", None, None, None);
    check("MiroThinker", "<use_mcp_tool> <tool_call>", None, None, None);
    check("plain Llama 3", "<|start_header_id|>", None, None, None);
}
