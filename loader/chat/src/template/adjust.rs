//! Conversations that a chat template refuses, normalised until it renders them: system messages
//! merged or moved, neighbours of one role joined, call ids and arguments in the form that the
//! template takes. Only what is needed is changed, and each change has a name for the client.

use std::collections::HashSet;

use super::past_calls::PastCalls;
use crate::{
    conversation::{Message, Role},
    json::{Json, Object},
};

/// One change of a conversation, in the order in which several are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Adjustment {
    /// Ids of calls as Mistral's templates insist on them: nine letters and digits.
    CallIds,
    /// Arguments that are no object become `{}`.
    Arguments,
    /// Several calls of one turn become turns of one call, each before its result.
    SplitCalls,
    /// System messages at the beginning become one.
    MergedSystem,
    /// Later system messages become a user's.
    SystemToUser,
    /// Results of calls that nobody made become a user's.
    OrphanResults,
    /// Calls and their results become text.
    CallsAsText,
    /// The system message becomes the beginning of the user's first.
    SystemInUser,
    /// An empty message of a user, where there is none at the beginning.
    InsertedUser,
    /// Neighbours of one role become one message.
    JoinedRoles,
    /// A short turn of the assistant between a result and the user's next message.
    InsertedAssistant,
}

impl Adjustment {
    /// In the order of application.
    const ALL: [Self; 11] = [
        Self::CallIds,
        Self::Arguments,
        Self::SplitCalls,
        Self::MergedSystem,
        Self::SystemToUser,
        Self::OrphanResults,
        Self::CallsAsText,
        Self::SystemInUser,
        Self::InsertedUser,
        Self::JoinedRoles,
        Self::InsertedAssistant,
    ];

    /// In the order in which they are tried: what changes least comes first.
    const TRIED: [Self; 11] = [
        Self::CallIds,
        Self::Arguments,
        Self::MergedSystem,
        Self::SystemToUser,
        Self::JoinedRoles,
        Self::SplitCalls,
        Self::InsertedAssistant,
        Self::OrphanResults,
        Self::InsertedUser,
        Self::SystemInUser,
        Self::CallsAsText,
    ];

    /// For headers and logs.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::CallIds => "call-ids",
            Self::Arguments => "broken-arguments",
            Self::SplitCalls => "split-calls",
            Self::MergedSystem => "merged-system",
            Self::SystemToUser => "system-to-user",
            Self::OrphanResults => "orphan-results",
            Self::CallsAsText => "calls-as-text",
            Self::SystemInUser => "system-in-user",
            Self::InsertedUser => "inserted-user",
            Self::JoinedRoles => "joined-roles",
            Self::InsertedAssistant => "inserted-assistant",
        }
    }

    /// The change of that name.
    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|adjustment| adjustment.name() == name)
    }

    fn apply(self, messages: Vec<Message>) -> Vec<Message> {
        match self {
            Self::CallIds => call_ids(messages),
            Self::Arguments => messages.into_iter().map(with_objects).collect(),
            Self::SplitCalls => split_calls(messages),
            Self::MergedSystem => merge_system(messages),
            Self::SystemToUser => system_to_user(messages),
            Self::OrphanResults => orphans(messages),
            Self::CallsAsText => calls_as_text(messages),
            Self::SystemInUser => system_in_user(messages),
            Self::InsertedUser => insert_user(messages),
            Self::JoinedRoles => join_roles(messages),
            Self::InsertedAssistant => insert_assistant(messages),
        }
    }
}

/// The first rendering that succeeds, and the adjustments that it needed; `forced` ones are made
/// whether the template refuses or not. Where nothing helps, the refusal of the conversation as
/// it came.
pub(super) fn render<T, E>(
    messages: &[Message],
    forced: &[Adjustment],
    render: impl Fn(&[Message]) -> Result<T, E>,
    may_adjust: impl Fn(&E) -> bool,
) -> Result<(T, Vec<Adjustment>), E> {
    let first = apply(messages, forced);
    let refusal = match render(&first) {
        Ok(rendered) => return Ok((rendered, effective(messages, forced))),
        Err(error) if !may_adjust(&error) => return Err(error),
        Err(error) => error,
    };
    let mut chosen = forced.to_vec();
    let mut tried = first;
    let mut found = None;
    for next in Adjustment::TRIED {
        if chosen.contains(&next) {
            continue;
        }
        chosen.push(next);
        let adjusted = apply(messages, &chosen);
        if adjusted == tried {
            continue;
        }
        if let Ok(rendered) = render(&adjusted) {
            found = Some(rendered);
            break;
        }
        tried = adjusted;
    }
    let Some(mut rendered) = found else { return Err(refusal) };
    // Of those that were tried before, only what is needed stays.
    for candidate in Adjustment::TRIED {
        if forced.contains(&candidate) || !chosen.contains(&candidate) {
            continue;
        }
        let fewer: Vec<_> = chosen.iter().copied().filter(|own| *own != candidate).collect();
        if let Ok(less) = render(&apply(messages, &fewer)) {
            (rendered, chosen) = (less, fewer);
        }
    }
    Ok((rendered, effective(messages, &chosen)))
}

fn apply(messages: &[Message], chosen: &[Adjustment]) -> Vec<Message> {
    let in_order = Adjustment::ALL.into_iter().filter(|own| chosen.contains(own));
    in_order.fold(messages.to_vec(), |messages, own| own.apply(messages))
}

/// Those that change something.
fn effective(messages: &[Message], chosen: &[Adjustment]) -> Vec<Adjustment> {
    let whole = apply(messages, chosen);
    let matters = |candidate: &Adjustment| {
        let fewer: Vec<_> = chosen.iter().copied().filter(|own| own != candidate).collect();
        apply(messages, &fewer) != whole
    };
    Adjustment::ALL.into_iter().filter(|own| chosen.contains(own) && matters(own)).collect()
}

fn user(text: &str) -> Message {
    Message::of(Role::User, text)
}

fn is_system(message: &Message) -> bool {
    matches!(message.role(), Role::System | Role::Developer)
}

fn joined(first: &str, second: &str) -> String {
    match (first.is_empty(), second.is_empty()) {
        (true, _) => second.to_owned(),
        (_, true) => first.to_owned(),
        _ => format!("{first}\n\n{second}"),
    }
}

/// Nine letters and digits that stand for an id, the same in every request.
fn nine(id: &str) -> String {
    const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    let hash = blake3::hash(id.as_bytes());
    let letter = |byte: &u8| char::from(ALPHABET[usize::from(*byte) % 62]);
    hash.as_bytes().iter().take(9).map(letter).collect()
}

fn call_ids(messages: Vec<Message>) -> Vec<Message> {
    let own = |message: Message| {
        let calls = message.calls().map(|calls| calls.iter().map(with_nine).collect());
        let id = message.fields().get("tool_call_id").and_then(Json::as_str).map(nine);
        let message = match calls {
            Some(calls) => message.with("tool_calls", Json::Array(calls)),
            None => message,
        };
        match id {
            Some(id) => message.with("tool_call_id", id.into()),
            None => message,
        }
    };
    messages.into_iter().map(own).collect()
}

fn with_nine(call: &Json) -> Json {
    let Json::Object(call) = call else { return call.clone() };
    let mut call = call.clone();
    let id = call.get("id").and_then(Json::as_str).unwrap_or_default();
    call.set("id", nine(id).into());
    Json::Object(call)
}

fn with_objects(message: Message) -> Message {
    let Some(calls) = message.calls() else { return message };
    let calls = calls.iter().map(|call| {
        let mut call = call.clone();
        if let Json::Object(members) = &mut call
            && let Some(Json::Object(function)) = members.get_mut("function")
            && !matches!(function.get("arguments"), Some(Json::Object(_)))
        {
            function.set("arguments", Json::Object(Object::default()));
        }
        call
    });
    let calls = calls.collect();
    message.with("tool_calls", Json::Array(calls))
}

fn call_id(call: &Json) -> Option<&str> {
    call.as_object()?.get("id")?.as_str()
}

fn split_calls(messages: Vec<Message>) -> Vec<Message> {
    let mut out = Vec::with_capacity(messages.len());
    let mut rest = messages.into_iter().peekable();
    while let Some(message) = rest.next() {
        let calls = message.calls().unwrap_or_default().to_vec();
        if calls.len() < 2 {
            out.push(message);
            continue;
        }
        let mut results = Vec::new();
        while let Some(result) = rest.next_if(|next| next.role() == Role::Tool) {
            results.push(result);
        }
        for (number, call) in calls.iter().enumerate() {
            let mut turn = message.clone().with("tool_calls", Json::Array(vec![call.clone()]));
            if number > 0 {
                let no_text = if turn.text().is_empty() { turn } else { turn.with_text("") };
                turn = no_text.without("reasoning_content").without("reasoning");
            }
            out.push(turn);
            let is_own = |result: &Message| {
                result.fields().get("tool_call_id").and_then(Json::as_str) == call_id(call)
            };
            let place = results.iter().position(is_own).or((!results.is_empty()).then_some(0));
            out.extend(place.map(|place| results.remove(place)));
        }
        out.append(&mut results);
    }
    out
}

fn merge_system(messages: Vec<Message>) -> Vec<Message> {
    let count = messages.iter().take_while(|message| is_system(message)).count();
    if count < 2 {
        return messages;
    }
    let texts = messages[..count].iter().map(Message::text);
    let text = texts.fold(String::new(), |all, text| joined(&all, text));
    let first = messages[0].clone().with_text(&text).with_role(Role::System);
    [first].into_iter().chain(messages.into_iter().skip(count)).collect()
}

/// A message that stands between a call and its results waits until after them.
fn system_to_user(messages: Vec<Message>) -> Vec<Message> {
    let first = messages.iter().take_while(|message| is_system(message)).count();
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    let mut waiting = Vec::new();
    let mut results = 0;
    for (index, message) in messages.into_iter().enumerate() {
        if index >= first && is_system(&message) {
            let message = user(message.text());
            if results > 0 {
                waiting.push(message);
            } else {
                out.push(message);
            }
            continue;
        }
        if message.role() == Role::Tool {
            results = results.max(1) - 1;
        } else {
            out.append(&mut waiting);
            results = message.calls().map_or(0, <[Json]>::len);
        }
        out.push(message);
        if results == 0 {
            out.append(&mut waiting);
        }
    }
    out.append(&mut waiting);
    out
}

fn orphans(messages: Vec<Message>) -> Vec<Message> {
    let mut known: HashSet<String> = HashSet::new();
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        known.extend(
            message.calls().unwrap_or_default().iter().filter_map(call_id).map(str::to_owned),
        );
        let id = message.fields().get("tool_call_id").and_then(Json::as_str);
        let is_orphan = message.role() == Role::Tool && !id.is_some_and(|id| known.contains(id));
        out.push(if is_orphan { user(&result_text(&message)) } else { message });
    }
    out
}

fn result_text(message: &Message) -> String {
    format!("<tool_response>\n{}\n</tool_response>", message.text())
}

fn calls_as_text(messages: Vec<Message>) -> Vec<Message> {
    let writer = PastCalls::generic();
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    let mut is_result = false;
    for message in messages {
        if message.role() == Role::Tool {
            let text = result_text(&message);
            match out.last_mut().filter(|_| is_result) {
                Some(last) => *last = user(&format!("{}\n{text}", last.text())),
                None => out.push(user(&text)),
            }
            is_result = true;
            continue;
        }
        is_result = false;
        if message.calls().is_none() {
            out.push(message);
            continue;
        }
        let written = writer.as_ref().map(|writer| writer.written(&message));
        out.push(written.unwrap_or(message).without("tool_calls"));
    }
    out
}

fn system_in_user(messages: Vec<Message>) -> Vec<Message> {
    let (system, mut rest): (Vec<_>, Vec<_>) = messages.into_iter().partition(is_system);
    if system.is_empty() {
        return rest;
    }
    let text = system.iter().map(Message::text);
    let text = text.fold(String::new(), |all, text| joined(&all, text));
    match rest.first_mut().filter(|first| first.role() == Role::User) {
        Some(first) => *first = first.clone().with_text(&joined(&text, first.text())),
        None => rest.insert(0, user(&text)),
    }
    rest
}

fn insert_user(mut messages: Vec<Message>) -> Vec<Message> {
    let first = messages.iter().take_while(|message| is_system(message)).count();
    if messages.get(first).is_none_or(|message| message.role() != Role::User) {
        messages.insert(first, user(""));
    }
    messages
}

fn join_roles(messages: Vec<Message>) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        let joins = matches!(message.role(), Role::User | Role::Assistant);
        let last = out.last_mut().filter(|last| joins && last.role() == message.role());
        // Results stand behind the calls of the first.
        let Some(last) = last.filter(|last| last.calls().is_none()) else {
            out.push(message);
            continue;
        };
        let text = joined(last.text(), message.text());
        let thought = last.fields().get("reasoning_content").cloned();
        let mut both = message.with_text(&text);
        if let Some(thought) = thought
            && both.fields().get("reasoning_content").is_none()
        {
            both = both.with("reasoning_content", thought);
        }
        *last = both;
    }
    out
}

fn insert_assistant(messages: Vec<Message>) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        let follows = out.last().is_some_and(|last| last.role() == Role::Tool);
        if follows && message.role() == Role::User {
            out.push(Message::of(Role::Assistant, "Done."));
        }
        out.push(message);
    }
    out
}
