//! What templates read in the messages of a conversation, clients leave out, and the conversation itself
//! tells: which call a result belongs to, and the name of its function.

use std::collections::HashMap;

use crate::{
    conversation::{Message, Role},
    json::Json,
};

/// The conversation with what it implies.
pub(super) fn filled(messages: &[Message]) -> Vec<Message> {
    // Names by the id of the call, and the calls of the last turn that have no result yet.
    let mut names: HashMap<String, String> = HashMap::new();
    let mut open: Vec<(Option<String>, String)> = Vec::new();
    let mut out = Vec::with_capacity(messages.len());
    for message in messages {
        let message = message.clone();
        if let Some(calls) = message.calls() {
            open = calls.iter().filter_map(named).collect();
            let known = open.iter().filter_map(|(id, name)| Some((id.clone()?, name.clone())));
            names.extend(known);
            let calls = calls.iter().map(with_type).collect();
            out.push(message.with("tool_calls", Json::Array(calls)));
            continue;
        }
        if message.role() != Role::Tool {
            out.push(message);
            continue;
        }
        let text = |key: &str| message.fields().get(key).and_then(Json::as_str);
        let id = text("tool_call_id").map(str::to_owned);
        let name = text("name").map(str::to_owned);
        // The call that this answers: by its id, by its name, or the next in order.
        let place = match (&id, &name) {
            (Some(id), _) => open.iter().position(|(own, _)| own.as_ref() == Some(id)),
            (None, Some(name)) => open.iter().position(|(_, own)| own == name),
            (None, None) => (!open.is_empty()).then_some(0),
        };
        let call = place.map(|place| open.remove(place));
        let known = id.as_ref().and_then(|id| names.get(id).cloned());
        let message = match (&name, known.or_else(|| call.clone().map(|(_, name)| name))) {
            (None, Some(name)) => message.with("name", name.into()),
            _ => message,
        };
        out.push(match (id, call.and_then(|(id, _)| id)) {
            (None, Some(id)) => message.with("tool_call_id", id.into()),
            _ => message,
        });
    }
    out
}

/// The id and the name of a call.
fn named(call: &Json) -> Option<(Option<String>, String)> {
    let call = call.as_object()?;
    let name = call.get("function")?.as_object()?.get("name")?.as_str()?;
    Some((call.get("id").and_then(Json::as_str).map(str::to_owned), name.to_owned()))
}

/// A call of the only kind that there is, if it does not say.
fn with_type(call: &Json) -> Json {
    let mut call = call.clone();
    if let Json::Object(members) = &mut call
        && members.get("type").is_none()
    {
        members.set("type", "function".into());
    }
    call
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(results: &str, expected: &str) {
        let calls = r#"{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}},{"id":"2","function":{"name":"g","arguments":"{}"}}]}"#;
        let texts = Json::parse(format!("[{calls},{results}]").as_bytes()).unwrap();
        let messages = texts.as_array().unwrap().iter().cloned();
        let messages: Vec<_> =
            messages.map(|message| Message::normalise(message).unwrap()).collect();
        let filled = filled(&messages);
        let text = |message: &Message, key: &str| {
            message.fields().get(key).and_then(Json::as_str).unwrap_or("?").to_owned()
        };
        let found: Vec<String> = filled[1..]
            .iter()
            .map(|message| format!("{}={}", text(message, "tool_call_id"), text(message, "name")))
            .collect();
        assert_eq!(found.join(" "), expected, "{results}");
        let call = filled[0].calls().unwrap()[1].as_object().unwrap();
        assert_eq!(call.get("type").and_then(Json::as_str), Some("function"));
    }

    #[test]
    fn results_have_the_id_and_the_name_of_their_call() {
        let result = |members: &str| format!(r#"{{"role":"tool","content":"r"{members}}}"#);
        let [plain, one, two] =
            ["", r#","tool_call_id":"1""#, r#","tool_call_id":"2""#].map(result);
        check(&format!("{two},{one}"), "2=g 1=f");
        check(&format!("{plain},{plain}"), "1=f 2=g");
        check(&result(r#","name":"g""#), "2=g");
        check(&result(r#","tool_call_id":"1","name":"own""#), "1=own");
        check(&result(r#","tool_call_id":"9""#), "9=?");
        check(&format!("{plain},{plain},{plain}"), "1=f 2=g ?=?");
    }
}
