//! One line of a task's file.

use serde_json::{Map, Value};

/// Choices of an item; the tasks of lm-eval have up to some dozens.
const MAX_REQUESTS: usize = 1024;

/// What is asked of the model.
#[derive(Debug, PartialEq)]
pub(super) struct Request {
    /// What stands before.
    pub(super) context: String,
    /// What may follow.
    pub(super) continuation: String,
}

impl Request {
    /// The context, and the whole. Spaces between them belong to what follows, as tokenizers have it.
    pub(super) fn texts(&self) -> [String; 2] {
        let whole = format!("{}{}", self.context, self.continuation);
        [self.context.trim_end().to_owned(), whole]
    }

    /// Characters of the choice, without the space that sets it apart.
    pub(super) fn characters(&self) -> usize {
        self.continuation.strip_prefix(' ').unwrap_or(&self.continuation).chars().count()
    }
}

/// A line.
#[derive(Debug, PartialEq)]
pub(super) struct Item {
    /// One, or one for each choice.
    pub(super) requests: Vec<Request>,
    /// Which choice is right; a continuation has none.
    pub(super) gold: Option<usize>,
}

impl Item {
    /// Parses a line.
    pub(super) fn parse(line: &str) -> Result<Self, String> {
        let fields: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| format!("not a JSON object: {error}"))?;
        let string = |name: &str| fields.get(name).and_then(Value::as_str);
        if let Some(arguments) = fields.get("arguments") {
            let requests = requests(arguments)?;
            let gold = if requests.len() > 1 { Some(index(&fields, "target")?) } else { None };
            return Self { requests, gold }.checked();
        }
        let context = string("query").or_else(|| string("context"));
        if let (Some(context), Some(choices)) = (context, fields.get("choices")) {
            let request = |choice: &Value| -> Result<Request, String> {
                let choice = choice.as_str().ok_or("choices: a list of texts is expected")?;
                Ok(Request { context: context.to_owned(), continuation: format!(" {choice}") })
            };
            let choices = choices.as_array().ok_or("choices: a list of texts is expected")?;
            let requests = choices.iter().map(request).collect::<Result<_, _>>()?;
            let name = if fields.contains_key("gold") { "gold" } else { "label" };
            return Self { requests, gold: Some(index(&fields, name)?) }.checked();
        }
        let pair = match (context, string("continuation"), string("text")) {
            (Some(context), Some(continuation), _) => Some((context, continuation.to_owned())),
            (_, _, Some(text)) => {
                text.rsplit_once(' ').map(|(context, word)| (context, format!(" {word}")))
            }
            _ => None,
        };
        let (context, continuation) = pair.ok_or(
            "no item: `arguments` and `target` (lm_eval --log_samples), `query`, `choices` and `gold`, \
             `context` and `continuation`, or a `text` of several words are expected",
        )?;
        let requests = vec![Request { context: context.to_owned(), continuation }];
        Self { requests, gold: None }.checked()
    }

    fn checked(self) -> Result<Self, String> {
        let count = self.requests.len();
        if count == 0 || count > MAX_REQUESTS {
            return Err(format!("{count} choices: 1 to {MAX_REQUESTS} are possible"));
        }
        match self.gold {
            Some(gold) if gold >= count => Err(format!("choice {gold} of {count} is to be right")),
            _ => Ok(self),
        }
    }
}

/// `[[context, continuation], …]`, or the same as objects, as lm-eval writes them.
fn requests(arguments: &Value) -> Result<Vec<Request>, String> {
    let wrong = || "arguments: pairs of context and continuation are expected".to_owned();
    let pair = |first: Option<&Value>, second: Option<&Value>| {
        let context = first.and_then(Value::as_str).ok_or_else(wrong)?;
        let continuation = match second {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Object(_)) => {
                return Err("the task generates text; tasks of continuations are scored".to_owned());
            }
            _ => return Err(wrong()),
        };
        Ok(Request { context: context.to_owned(), continuation })
    };
    match arguments {
        Value::Array(list) => list.iter().map(|it| pair(it.get(0), it.get(1))).collect(),
        Value::Object(map) => {
            let number = |index: usize| map.get(&format!("gen_args_{index}"));
            let numbered = (0..map.len()).map(|index| number(index).ok_or_else(wrong));
            numbered.map(|it| it.and_then(|it| pair(it.get("arg_0"), it.get("arg_1")))).collect()
        }
        _ => Err(wrong()),
    }
}

/// A number, as such or as text.
fn index(fields: &Map<String, Value>, name: &str) -> Result<usize, String> {
    let value = fields.get(name).unwrap_or(&Value::Null);
    let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok());
    let number = number.and_then(|number| usize::try_from(number).ok());
    number.ok_or_else(|| format!("{name}: the number of the right choice is expected, not {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(pairs: &[[&str; 2]], gold: Option<usize>) -> Item {
        let request = |[context, continuation]: &[&str; 2]| Request {
            context: (*context).to_owned(),
            continuation: (*continuation).to_owned(),
        };
        Item { requests: pairs.iter().map(request).collect(), gold }
    }

    #[test]
    fn every_form_gives_its_requests() {
        let check = |line: &str, expected: Item| {
            assert_eq!(Item::parse(line).as_ref(), Ok(&expected), "{line}");
        };
        let sample = r#"{"doc_id":0,"target":"1","arguments":{"gen_args_0":{"arg_0":"Q","arg_1":" a"},"gen_args_1":{"arg_0":"Q","arg_1":" b"}},"resps":[]}"#;
        check(sample, item(&[["Q", " a"], ["Q", " b"]], Some(1)));
        let sample = r#"{"target":" word","arguments":[["some"," word"]]}"#;
        check(sample, item(&[["some", " word"]], None));
        let choice = r#"{"query":"Q","choices":["a","b","c"],"gold":2}"#;
        check(choice, item(&[["Q", " a"], ["Q", " b"], ["Q", " c"]], Some(2)));
        let choice = r#"{"context":"Q","choices":["a"],"label":"0"}"#;
        check(choice, item(&[["Q", " a"]], Some(0)));
        check(r#"{"text":"in the beginning"}"#, item(&[["in the", " beginning"]], None));
        check(r#"{"context":"in","continuation":"to"}"#, item(&[["in", "to"]], None));
    }

    #[test]
    fn what_is_no_item_is_refused() {
        let check = |line: &str, expected: &str| {
            let error = Item::parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        };
        check("[]", "not a JSON object");
        check("{}", "no item");
        check(r#"{"text":"one"}"#, "no item");
        check(r#"{"query":"Q","choices":["a"],"gold":1}"#, "choice 1 of 1");
        check(r#"{"query":"Q","choices":[],"gold":0}"#, "0 choices");
        check(r#"{"query":"Q","choices":["a"]}"#, "label: the number");
        check(r#"{"arguments":{"gen_args_1":{}}}"#, "pairs of context");
        check(r#"{"arguments":[["Q",{"until":["\n"]}]],"target":"x"}"#, "generates text");
    }

    #[test]
    fn spaces_before_a_continuation_belong_to_it() {
        let request = Request { context: "a \n".to_owned(), continuation: " b".to_owned() };
        assert_eq!(request.texts(), ["a".to_owned(), "a \n b".to_owned()]);
        assert_eq!(request.characters(), 1);
    }
}
