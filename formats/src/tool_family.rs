//! How a model writes calls of tools and its thinking, told from the text of its chat template.
//! Names and markers only: parsing and constraining are the loader's.

mod detect;

use serde::{Deserialize, Serialize};

/// A tool-call format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolFamily {
    /// `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>` (Hermes, Qwen 2.5 and 3, EXAONE 4,
    /// Granite 4, Ernie 4.5).
    JsonTags,
    /// Bare `{"name": …, "parameters": {…}}` as the whole turn (Llama 3, Llama 4).
    LlamaJson,
    /// `[f(a="x"), g(b=1)]` as the whole turn (Llama 3.2, Llama 4).
    LlamaPythonic,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]` (Mistral up to v7).
    MistralJson,
    /// `[TOOL_CALLS]name[ARGS]{…}` (Mistral from v11).
    MistralNames,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`
    /// (Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5, `MiMo` V2).
    QwenXml,
    /// The same within `<seed:tool_call>` (Seed-OSS).
    SeedXml,
    /// Sections of special tokens, the arguments in a fence after a line with the name
    /// (DeepSeek V3, R1).
    DeepseekV3,
    /// Sections of special tokens, `name<sep>{…}` (DeepSeek V3.1).
    DeepseekV31,
    /// `<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v…`
    /// (DeepSeek V3.2).
    DeepseekV32,
    /// The same within `<｜DSML｜tool_calls>` (DeepSeek V4).
    DeepseekV4,
    /// Sections of special tokens, `functions.name:0<argument>{…}` (Kimi K2).
    KimiK2,
    /// `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>` (GLM 4.5 to 5).
    Glm4,
    /// `<tool_calls><tool_call>name<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value>…`, each
    /// tag with `:opensource` before its end (Hunyuan 3).
    HunyuanXml,
    /// Channels with recipients (gpt-oss).
    Harmony,
    /// `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke>…`.
    MinimaxM2,
    /// `<tool_call><invoke name="f"><k>v</k></invoke></tool_call>` with `]<]minimax[>[` before each
    /// tag; objects are tags within tags, members of lists are each in `<item>`.
    MinimaxM3,
    /// `<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>` (Hunyuan, Apriel; `MiniMax` M1
    /// without the list).
    ToolCallsJson,
    /// `<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>` (Nemotron Nano 2, Nemotron Super).
    NemotronJson,
    /// `<toolcall> {"name": …, "arguments": {…}} </toolcall>` (Nemotron Mini).
    NemotronTags,
    /// `<longcat_tool_call>\n{"name": …, "arguments": {…}}\n</longcat_tool_call>` (`LongCat` Flash).
    LongcatJson,
    /// `<|tool_call|>[{"name": …, "arguments": {…}}]` (Granite 3).
    GraniteJson,
    /// `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`
    /// (Command R7B, Command A).
    CohereJson,
    /// ` -> tool/function_call\n[{"name": …, "arguments": {…}}]` in the head of a turn
    /// (`HyperCLOVA` X).
    HyperclovaJson,
    /// `<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>` (`InternLM`).
    InternlmJson,
    /// `<|tools_prefix|>[{"name": {…}}]<|tools_suffix|>` (Apertus).
    ApertusJson,
    /// `<|tool_calls|><|tool_call:begin|>id<|tool_call:name|>f<|tool_call:args|>{…}<|tool_call:end|>`
    /// and `<|calls|>` (Solar Open).
    Solar,
    /// `<|tool_call_start|>[f(a="x")]<|tool_call_end|>` (LFM2).
    Lfm2,
    /// `<function_calls>`, a call in Python on each line, `</function_calls>` (`OLMo` 3).
    Olmo3,
    /// `<|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>` (Gemma 4).
    Gemma4,
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
    /// `<think:opensource>…</think:opensource>` (Hunyuan 3).
    HunyuanTags,
    /// `<mm:think>…</mm:think>`, and the closing tag alone where nothing was thought (`MiniMax` M3).
    MinimaxTags,
    /// `<longcat_think>…</longcat_think>` (`LongCat` Flash).
    LongcatTags,
    /// `<|START_THINKING|>…<|END_THINKING|>` (Cohere).
    CohereTags,
    /// `<|inner_prefix|>…<|inner_suffix|>` (Apertus).
    InnerTags,
    /// A turn of its own from `<|think|>` to `<|end|>` (Solar Open).
    SolarTurn,
    /// A turn of its own, whose head goes on with `/think` (`HyperCLOVA` X).
    HyperclovaTurn,
    /// `<|channel>thought\n…<channel|>` (Gemma 4).
    ThoughtChannel,
    /// A channel of its own; see [`ToolFamily::Harmony`].
    Channels,
}

impl ThinkingStyle {
    /// What opens and closes thinking; channels have no such pair.
    #[must_use]
    pub const fn tags(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::ThinkTags => ("<think>", "</think>"),
            Self::BracketTags => ("[THINK]", "[/THINK]"),
            Self::SeedTags => ("<seed:think>", "</seed:think>"),
            Self::HunyuanTags => ("<think:opensource>", "</think:opensource>"),
            Self::MinimaxTags => ("<mm:think>", "</mm:think>"),
            Self::LongcatTags => ("<longcat_think>", "</longcat_think>"),
            Self::CohereTags => ("<|START_THINKING|>", "<|END_THINKING|>"),
            Self::InnerTags => ("<|inner_prefix|>", "<|inner_suffix|>"),
            Self::SolarTurn => ("<|think|>", "<|end|>"),
            Self::HyperclovaTurn => ("/think\n", "<|im_end|>"),
            Self::ThoughtChannel => ("<|channel>", "<channel|>"),
            Self::Channels => return None,
        })
    }

    /// Letters that stand between the opening tag and the thinking itself.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::ThoughtChannel => "thought\n",
            _ => "",
        }
    }

    /// Whether an answer without thinking begins with the closing tag.
    #[must_use]
    pub const fn closes_nothing(self) -> bool {
        matches!(self, Self::MinimaxTags)
    }

    /// The variable of a template's own by which a client's wish to think is told, and its value;
    /// absent: templates of this style have none but those that every template is told.
    #[must_use]
    pub const fn switch(self, enabled: bool) -> Option<(&'static str, &'static str)> {
        match self {
            Self::MinimaxTags if enabled => Some(("thinking_mode", "enabled")),
            Self::MinimaxTags => Some(("thinking_mode", "disabled")),
            _ => None,
        }
    }
}

/// What a model writes around its answer, which is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerFrame {
    /// `<answer>…</answer>` (Hunyuan).
    AnswerTags,
    /// `<response>…</response>` (Ernie 4.5, Granite 3).
    ResponseTags,
    /// `<|START_RESPONSE|>…<|END_RESPONSE|>` (Cohere).
    CohereResponse,
    /// `<|START_TEXT|>…<|END_TEXT|>` (Cohere).
    CohereText,
    /// Thinking and answer are turns, each with its head (Solar Open).
    SolarTurns,
    /// Likewise (`HyperCLOVA` X).
    HyperclovaTurns,
}

impl AnswerFrame {
    /// Tags that may as well be part of an answer, unless they begin and end it.
    #[must_use]
    pub const fn tags(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::AnswerTags => ("<answer>", "</answer>"),
            Self::ResponseTags => ("<response>", "</response>"),
            _ => return None,
        })
    }

    /// Markers, with letters that belong to them, that are never part of an answer.
    #[must_use]
    pub const fn silent(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::CohereResponse => &[("<|START_RESPONSE|>", ""), ("<|END_RESPONSE|>", "")],
            Self::CohereText => &[("<|START_TEXT|>", ""), ("<|END_TEXT|>", "")],
            Self::SolarTurns => &[("<|begin|>", "assistant"), ("<|content|>", ""), ("<|end|>", "")],
            Self::HyperclovaTurns => &[("<|im_start|>", "assistant"), ("<|im_end|>", "")],
            Self::AnswerTags | Self::ResponseTags => &[],
        }
    }
}

/// What a template says of its model's tool-call format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputStyle {
    /// How calls are written; absent: the template has no calls, or in an unknown way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<ToolFamily>,
    /// How thinking is written; absent: the template has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<ThinkingStyle>,
    /// What stands around the answer; absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<AnswerFrame>,
}

impl OutputStyle {
    /// Tells the style from the source of a chat template. The text decides and not a trial
    /// render, since templates with two ways of writing name both but the markers of one family
    /// never stand in the template of another; the more particular marker is asked for first.
    #[must_use]
    pub fn detect(template: &str) -> Self {
        detect::style(template)
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
            answer: None,
        };
        let text = serde_json::to_string(&style).unwrap();
        assert_eq!(text, r#"{"tools":"deepseek_v31","thinking":"think_tags"}"#);
        assert_eq!(serde_json::from_str::<OutputStyle>(&text).unwrap(), style);
    }
}
