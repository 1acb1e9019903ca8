//! Which parser reads a model's output, and what the server can hold it to. The seam between the
//! dialects and the handling of calls, thinking and constraints.

use super::{
    dialect::refused,
    error::ApiError,
    inner::{ChatRequest, OutputParser, PlainText, ResponseFormat, ToolChoice},
};

/// The parser of one answer to `request`.
pub(super) fn parser(_request: &ChatRequest) -> Box<dyn OutputParser> {
    Box::new(PlainText::default())
}

/// Refuses what cannot be enforced, by its parameter's name.
pub(super) fn check(request: &ChatRequest) -> Result<(), ApiError> {
    match &request.tool_choice {
        ToolChoice::Auto | ToolChoice::None | ToolChoice::Allowed { required: false, .. } => {}
        ToolChoice::Required | ToolChoice::Named(_) | ToolChoice::Allowed { .. } => {
            return Err(refused("tool_choice", "only \"auto\" and \"none\" are"));
        }
    }
    let param = match &request.response_format {
        ResponseFormat::Text => return Ok(()),
        ResponseFormat::JsonObject => "response_format",
        ResponseFormat::JsonSchema { param, .. } => param,
        ResponseFormat::Regex(_) | ResponseFormat::Grammar(_) | ResponseFormat::Choice(_) => {
            "structured_outputs"
        }
    };
    Err(refused(param, "only plain text is"))
}
