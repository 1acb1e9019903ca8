//! The launchd example: a property list as Apple's DTD has it, of a daemon that launchd accepts.

use std::{collections::BTreeMap, fs, path::Path};

/// A value of a property list.
#[derive(Debug, PartialEq)]
enum Value {
    Text(String),
    Integer(i64),
    Boolean(bool),
    Array(Vec<Value>),
    Dict(BTreeMap<String, Value>),
}

/// What is left of a property list. Strict: what it does not know is an error.
struct Parser<'a>(&'a str);

impl<'a> Parser<'a> {
    /// Without white space and comments before the next tag.
    fn skip(&mut self) {
        loop {
            self.0 = self.0.trim_start();
            let Some(comment) = self.0.strip_prefix("<!--") else { return };
            let (text, rest) = comment.split_once("-->").expect("the comment ends");
            assert!(!text.contains("--"), "XML has no -- within comments: {text}");
            self.0 = rest;
        }
    }

    fn take(&mut self, expected: &str) -> bool {
        self.skip();
        let rest = self.0.strip_prefix(expected);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, expected: &str) {
        assert!(self.take(expected), "expected {expected} before {:.60}", self.0);
    }

    /// The text up to the end of its element.
    fn text(&mut self, element: &str) -> &'a str {
        let (text, rest) = self.0.split_once("</").expect("the element ends");
        self.0 = rest.strip_prefix(element).expect("it is the one that began");
        self.expect(">");
        assert!(!text.contains(['<', '>', '&']), "{text:?} is plain text");
        text
    }

    fn value(&mut self) -> Value {
        if self.take("<string>") {
            Value::Text(self.text("string").to_owned())
        } else if self.take("<integer>") {
            Value::Integer(self.text("integer").parse().expect("a number"))
        } else if self.take("<true/>") {
            Value::Boolean(true)
        } else if self.take("<false/>") {
            Value::Boolean(false)
        } else if self.take("<array>") {
            let mut values = Vec::new();
            while !self.take("</array>") {
                values.push(self.value());
            }
            Value::Array(values)
        } else {
            self.expect("<dict>");
            let mut entries = BTreeMap::new();
            while !self.take("</dict>") {
                self.expect("<key>");
                let key = self.text("key").to_owned();
                let value = self.value();
                assert!(entries.insert(key.clone(), value).is_none(), "{key} stands twice");
            }
            Value::Dict(entries)
        }
    }
}

/// The value of a property list.
fn parse(text: &str) -> Value {
    let mut parser = Parser(text);
    parser.expect("<?xml version=\"1.0\" encoding=\"UTF-8\"?>");
    parser.expect(
        "<!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \
         \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">",
    );
    parser.expect("<plist version=\"1.0\">");
    let value = parser.value();
    parser.expect("</plist>");
    parser.skip();
    assert_eq!(parser.0, "", "nothing follows");
    value
}

#[test]
fn the_launchd_example_is_a_daemon_of_a_user() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/launchd/org.shardpack.node.plist");
    let text = fs::read_to_string(&path).unwrap();
    let Value::Dict(entries) = parse(&text) else { panic!("no dictionary") };
    // launchd.plist(5): the label is the file's name, paths are absolute.
    let text_of = |key: &str| match &entries[key] {
        Value::Text(text) => text.as_str(),
        other => panic!("{key} is {other:?}"),
    };
    assert_eq!(Some(text_of("Label")), path.file_stem().and_then(|it| it.to_str()));
    let user = text_of("UserName");
    assert!(!user.is_empty() && user != "root", "{user}");
    for key in ["StandardErrorPath", "StandardOutPath"] {
        assert!(text_of(key).starts_with('/'), "{key}");
    }
    let Value::Array(arguments) = &entries["ProgramArguments"] else { panic!("no arguments") };
    let arguments: Vec<&str> = arguments
        .iter()
        .map(|it| match it {
            Value::Text(text) => text.as_str(),
            other => panic!("{other:?} is no argument"),
        })
        .collect();
    assert!(arguments[0].starts_with('/') && arguments[1] == "node", "{arguments:?}");
    assert_eq!(entries["RunAtLoad"], Value::Boolean(true));
    assert_eq!(entries["KeepAlive"], Value::Boolean(true));
    // Keys of daemons only; a misspelt one would be ignored by launchd.
    let known = [
        "EnvironmentVariables",
        "KeepAlive",
        "Label",
        "ProcessType",
        "ProgramArguments",
        "RunAtLoad",
        "SoftResourceLimits",
        "StandardErrorPath",
        "StandardOutPath",
        "ThrottleInterval",
        "UserName",
    ];
    for key in entries.keys() {
        assert!(known.contains(&key.as_str()), "{key} is a key of launchd.plist(5)?");
    }
    // The program takes these arguments: only the folder of its packages is wrong here.
    let output = crate::harness::shardpack().args(&arguments[1..]).arg("--help").output().unwrap();
    assert!(output.status.success());
    assert!(text.contains("/Library/LaunchDaemons/"), "it says where it belongs");
}
