//! How a model writes calls of tools and its thinking, told from the text of its chat template.
//! Names and markers only: parsing and constraining are the loader's.

use serde::{Deserialize, Serialize};

/// A published way of writing calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolFamily {
    /// `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>` (Hermes, Qwen 2.5 and 3).
    JsonTags,
    /// Bare `{"name": …, "parameters": {…}}` as the whole turn (Llama 3).
    LlamaJson,
    /// `[f(a="x"), g(b=1)]` as the whole turn (Llama 3.2, Llama 4).
    LlamaPythonic,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]` (Mistral up to v7).
    MistralJson,
    /// `[TOOL_CALLS]name[ARGS]{…}` (Mistral from v11).
    MistralNames,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`
    /// (Qwen3-Coder, Qwen3.5, Nemotron 3).
    QwenXml,
    /// Sections of special tokens, the arguments in a fence after a line with the name
    /// (DeepSeek V3, R1).
    DeepseekV3,
    /// Sections of special tokens, `name<sep>{…}` (DeepSeek V3.1).
    DeepseekV31,
    /// `<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v…`
    /// (DeepSeek V3.2).
    DeepseekV32,
    /// Sections of special tokens, `functions.name:0<argument>{…}` (Kimi K2).
    KimiK2,
    /// `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>` (GLM 4.5 to 4.7).
    Glm4,
    /// Channels with recipients (gpt-oss).
    Harmony,
    /// `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>…`.
    MinimaxM2,
}

/// How a model sets its thinking apart from its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThinkingStyle {
    /// `<think>…</think>`.
    ThinkTags,
    /// `[THINK]…[/THINK]`.
    BracketTags,
    /// `<seed:think>…</seed:think>`.
    SeedTags,
    /// A channel of its own; see [`ToolFamily::Harmony`].
    Channels,
}

impl ThinkingStyle {
    /// What opens and closes thinking; channels have no such pair.
    #[must_use]
    pub const fn tags(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::ThinkTags => Some(("<think>", "</think>")),
            Self::BracketTags => Some(("[THINK]", "[/THINK]")),
            Self::SeedTags => Some(("<seed:think>", "</seed:think>")),
            Self::Channels => None,
        }
    }
}

/// What a template says of its model's way of writing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputStyle {
    /// How calls are written; absent: the template has no calls, or in an unknown way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<ToolFamily>,
    /// How thinking is written; absent: the template has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<ThinkingStyle>,
}

impl OutputStyle {
    /// Tells the style from the source of a chat template. The text decides and not a trial
    /// render, since templates with two ways of writing name both but the markers of one family
    /// never stand in the template of another; the more particular marker is asked for first.
    #[must_use]
    pub fn detect(template: &str) -> Self {
        Self { tools: detect_tools(template), thinking: detect_thinking(template) }
    }
}

fn detect_tools(template: &str) -> Option<ToolFamily> {
    let has = |marker: &str| template.contains(marker);
    if has("<|channel|>") && has("<|message|>") && has("functions.") {
        return Some(ToolFamily::Harmony);
    }
    if has("<|tool_calls_section_begin|>") {
        return Some(ToolFamily::KimiK2);
    }
    if has("<minimax:tool_call>") {
        return Some(ToolFamily::MinimaxM2);
    }
    if has("<｜tool▁calls▁begin｜>") {
        // Only the older form wraps arguments in a fence.
        let fenced = has("```json");
        return Some(if fenced { ToolFamily::DeepseekV3 } else { ToolFamily::DeepseekV31 });
    }
    if has("｜DSML｜function_calls>") {
        return Some(ToolFamily::DeepseekV32);
    }
    if has("<arg_key>") {
        return Some(ToolFamily::Glm4);
    }
    if has("<function=") && has("<parameter=") {
        return Some(ToolFamily::QwenXml);
    }
    if has("[TOOL_CALLS]") {
        let named = has("[ARGS]");
        return Some(if named { ToolFamily::MistralNames } else { ToolFamily::MistralJson });
    }
    if has("<tool_call>") {
        return Some(ToolFamily::JsonTags);
    }
    let is_llama = has("<|start_header_id|>") || has("<|header_start|>") || has("<|python_tag|>");
    if is_llama && has("tool_call") {
        // The instructions of the pythonic form show it by example.
        let pythonic =
            has("[func_name1(") || has("tool_call.name + '('") || has("<|python_start|>[");
        return Some(if pythonic { ToolFamily::LlamaPythonic } else { ToolFamily::LlamaJson });
    }
    None
}

fn detect_thinking(template: &str) -> Option<ThinkingStyle> {
    let has = |marker: &str| template.contains(marker);
    if has("<|channel|>") && has("analysis") {
        Some(ThinkingStyle::Channels)
    } else if has("<seed:think>") {
        Some(ThinkingStyle::SeedTags)
    } else if has("[THINK]") {
        Some(ThinkingStyle::BracketTags)
    } else if has("<think>") || has("</think>") {
        Some(ThinkingStyle::ThinkTags)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neutral_style_serialises_to_nothing() {
        assert_eq!(serde_json::to_string(&OutputStyle::default()).unwrap(), "{}");
        let style = OutputStyle {
            tools: Some(ToolFamily::DeepseekV31),
            thinking: Some(ThinkingStyle::ThinkTags),
        };
        let text = serde_json::to_string(&style).unwrap();
        assert_eq!(text, r#"{"tools":"deepseek_v31","thinking":"think_tags"}"#);
        assert_eq!(serde_json::from_str::<OutputStyle>(&text).unwrap(), style);
    }

    #[test]
    fn markers_tell_families_apart() {
        let check = |template: &str, tools| {
            assert_eq!(OutputStyle::detect(template).tools, tools, "{template}");
        };
        check("{{ messages }}", None);
        check("<tool_call>{\"name\"", Some(ToolFamily::JsonTags));
        check("<tool_call><function=<parameter=", Some(ToolFamily::QwenXml));
        check("<tool_call><arg_key>", Some(ToolFamily::Glm4));
        check("[TOOL_CALLS] [", Some(ToolFamily::MistralJson));
        check("[TOOL_CALLS]name[ARGS]", Some(ToolFamily::MistralNames));
        check("<|start_header_id|> tool_calls", Some(ToolFamily::LlamaJson));
        check("<|header_start|> tool_calls [func_name1(", Some(ToolFamily::LlamaPythonic));
        check("<｜tool▁calls▁begin｜>```json", Some(ToolFamily::DeepseekV3));
        check("<｜tool▁calls▁begin｜>", Some(ToolFamily::DeepseekV31));
        check("<｜DSML｜function_calls>", Some(ToolFamily::DeepseekV32));
        let thinking = |template: &str| OutputStyle::detect(template).thinking;
        assert_eq!(thinking("x</think>"), Some(ThinkingStyle::ThinkTags));
        assert_eq!(thinking("[THINK]"), Some(ThinkingStyle::BracketTags));
        assert_eq!(thinking("plain"), None);
    }
}
