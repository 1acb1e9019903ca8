//! The markers by which templates give their families away.

use super::{AnswerFrame, OutputStyle, ThinkingStyle, ToolFamily};

/// One way to tell: all of the first must stand in a template, none of the second may.
type Sign<T> = (T, &'static [&'static str], &'static [&'static str]);

/// The first that holds decides.
const TOOLS: [Sign<Option<ToolFamily>>; 39] = [
    (Some(ToolFamily::Harmony), &["<|channel|>", "<|message|>", "functions."], &[]),
    (Some(ToolFamily::KimiK2), &["<|tool_calls_section_begin|>"], &[]),
    (Some(ToolFamily::MinimaxM2), &["<minimax:tool_call>"], &[]),
    (Some(ToolFamily::MinimaxM3), &["]<]minimax[>["], &[]),
    // Only the older form wraps arguments in a fence.
    (Some(ToolFamily::DeepseekV3), &["<｜tool▁calls▁begin｜>", "```json"], &[]),
    (Some(ToolFamily::DeepseekV31), &["<｜tool▁calls▁begin｜>"], &[]),
    // Some write the token within the tags once, as a variable.
    (Some(ToolFamily::DeepseekV32), &["｜DSML｜", "function_calls>"], &[]),
    (Some(ToolFamily::DeepseekV4), &["｜DSML｜", "tool_calls>"], &[]),
    (Some(ToolFamily::HunyuanXml), &["<tool_sep{}>", ":opensource"], &[]),
    (Some(ToolFamily::HunyuanXml), &["<tool_sep:opensource>"], &[]),
    (Some(ToolFamily::Gemma4), &["<|tool_call>call:"], &[]),
    (Some(ToolFamily::ApertusJson), &["<|tools_prefix|>"], &[]),
    (Some(ToolFamily::Solar), &["<|tool_call:begin|>"], &[]),
    (Some(ToolFamily::Lfm2), &["<|tool_call_start|>"], &[]),
    // Templates that show tools and leave the calls to the client.
    (Some(ToolFamily::Lfm2), &["<|tool_list_start|>"], &[]),
    (Some(ToolFamily::Lfm2), &["List of tools: ["], &[]),
    (Some(ToolFamily::SeedXml), &["<seed:tool_call>"], &[]),
    (Some(ToolFamily::CohereJson), &["<|START_ACTION|>"], &[]),
    (Some(ToolFamily::HyperclovaJson), &["tool/function_call"], &[]),
    (Some(ToolFamily::InternlmJson), &["<|action_start|>"], &[]),
    (Some(ToolFamily::InternlmJson), &["<|plugin|>"], &[]),
    // Ways of writing that nobody here reads, with markers that others have too.
    (None, &["<use_mcp_tool>"], &[]),
    (None, &["<longcat_arg_key>"], &[]),
    (None, &["<atem:function_calls>"], &[]),
    (None, &[">>>", "recipient"], &[]),
    (None, &["functools"], &["<|tool_call|>"]),
    (Some(ToolFamily::Glm4), &["<tool_call>", "<arg_key>"], &[]),
    (Some(ToolFamily::QwenXml), &["<tool_call>", "<function=", "<parameter="], &[]),
    (None, &["<function="], &["<tool_call>"]),
    (Some(ToolFamily::MistralNames), &["[TOOL_CALLS]", "[ARGS]"], &[]),
    (Some(ToolFamily::MistralJson), &["[TOOL_CALLS]"], &[]),
    (Some(ToolFamily::NemotronJson), &["<TOOLCALL>"], &[]),
    (Some(ToolFamily::NemotronTags), &["<toolcall>"], &[]),
    (Some(ToolFamily::LongcatJson), &["<longcat_tool_call>"], &[]),
    (Some(ToolFamily::ToolCallsJson), &["<tool_calls>"], &[]),
    (Some(ToolFamily::Olmo3), &["<function_calls>"], &[]),
    (Some(ToolFamily::GraniteJson), &["<|tool_call|>"], &[]),
    (Some(ToolFamily::JsonTags), &["<tool_call>"], &[]),
    (None, &[], &["tool_call"]),
];

const THINKING: [Sign<ThinkingStyle>; 14] = [
    (ThinkingStyle::Channels, &["<|channel|>", "analysis"], &[]),
    (ThinkingStyle::ThoughtChannel, &["<|channel>thought"], &[]),
    (ThinkingStyle::SeedTags, &["<seed:think>"], &[]),
    (ThinkingStyle::BracketTags, &["[THINK]"], &[]),
    (ThinkingStyle::CohereTags, &["<|START_THINKING|>"], &[]),
    (ThinkingStyle::InnerTags, &["<|inner_prefix|>"], &[]),
    (ThinkingStyle::SolarTurn, &["<|think|>", "<|content|>", "<|begin|>"], &[]),
    (ThinkingStyle::HyperclovaTurn, &["assistant/think"], &[]),
    (ThinkingStyle::HunyuanTags, &["<think{}>", ":opensource"], &[]),
    (ThinkingStyle::HunyuanTags, &["<think:opensource>"], &[]),
    (ThinkingStyle::MinimaxTags, &["<mm:think>"], &[]),
    (ThinkingStyle::LongcatTags, &["<longcat_think>"], &[]),
    (ThinkingStyle::ThinkTags, &["<think>"], &[]),
    (ThinkingStyle::ThinkTags, &["</think>"], &[]),
];

const ANSWER: [Sign<AnswerFrame>; 9] = [
    (AnswerFrame::CohereResponse, &["<|START_RESPONSE|>"], &[]),
    (AnswerFrame::CohereText, &["<|START_TEXT|>"], &[]),
    (AnswerFrame::SolarTurns, &["<|begin|>", "<|content|>", "<|end|>"], &[]),
    (AnswerFrame::HyperclovaTurns, &["<|im_start|>assistant", "tool/function_call"], &[]),
    (AnswerFrame::HyperclovaTurns, &["assistant/think"], &[]),
    (AnswerFrame::AnswerTags, &["<answer>", "</answer>"], &[]),
    // Hunyuan's templates with tools say nothing of its tags.
    (AnswerFrame::AnswerTags, &["<|startoftext|>", "<|extra_0|>"], &[]),
    // `MiniMax` wraps results of tools in tags of that name.
    (AnswerFrame::ResponseTags, &["<response>", "</response>", "</think>"], &["minimax"]),
    (AnswerFrame::ResponseTags, &["<response></response>"], &["minimax"]),
];

pub(super) fn style(template: &str) -> OutputStyle {
    OutputStyle {
        tools: tools(template),
        thinking: first(&THINKING, template),
        answer: first(&ANSWER, template),
    }
}

fn first<T: Copy>(signs: &[Sign<T>], template: &str) -> Option<T> {
    let has = |marker: &&str| template.contains(*marker);
    let holds = |(_, all, none): &&Sign<T>| all.iter().all(has) && !none.iter().any(has);
    signs.iter().find(holds).map(|(value, ..)| *value)
}

fn tools(template: &str) -> Option<ToolFamily> {
    if let Some(family) = first(&TOOLS, template) {
        return family;
    }
    let has = |marker: &str| template.contains(marker);
    let is_llama = has("<|start_header_id|>") || has("<|header_start|>") || has("<|python_tag|>");
    // The instructions of the pythonic form show it by example.
    let pythonic = has("[func_name1(") || has("tool_call.name + '('") || has("<|python_start|>[");
    is_llama.then_some(if pythonic { ToolFamily::LlamaPythonic } else { ToolFamily::LlamaJson })
}

#[cfg(test)]
mod tests;
