//! Tokens that an answer took, as every API reports them.

/// Token usage of one choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "the names that every API uses")]
pub(super) struct AnswerUsage {
    pub(super) prompt_tokens: u32,
    /// Of these, tokens found in the prefix cache.
    pub(super) cached_tokens: u32,
    pub(super) completion_tokens: u32,
    /// Of these, reasoning tokens.
    pub(super) reasoning_tokens: u32,
    /// Accepted and rejected tokens of the predicted output.
    pub(super) prediction_tokens: [u32; 2],
}
