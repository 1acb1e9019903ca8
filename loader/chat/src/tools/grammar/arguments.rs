//! The grammar of arguments that a model writes one by one between tags, and of texts that it
//! writes bare there.

use std::fmt::Write;

use serde_json::{Map, Value};
use shardpack_engine_api::TokenId;
use shardpack_formats::ToolFamily;

use super::{
    super::{
        schema::{SchemaError, applicable::Applicable, enforceable, references::followed},
        tagged_arguments::{DSML, has_dsml},
        value::{Reading, reading},
    },
    ConstrainedTool, Writer,
    lark::BARE,
    quoted,
};

/// Keywords of texts that a model writes bare which the grammar holds it to, and remarks.
const FREE: [&str; 10] = [
    "type",
    "description",
    "title",
    "minLength",
    "maxLength",
    "anyOf",
    "$defs",
    "definitions",
    "default",
    "examples",
];

/// Remarks, and definitions that references point into.
pub(super) const REMARKS: [&str; 8] =
    ["description", "title", "$schema", "$id", "$defs", "definitions", "default", "examples"];

impl Writer<'_> {
    /// Arguments one by one between tags.
    pub(super) fn params(
        &mut self,
        family: ToolFamily,
        tool: &ConstrainedTool,
    ) -> Result<String, SchemaError> {
        let params = Params::of(&tool.schema)?;
        let mut body = match family {
            ToolFamily::QwenXml | ToolFamily::SeedXml => {
                quoted(&format!("<function={}>", tool.name)) + " WS?"
            }
            ToolFamily::HunyuanXml => {
                format!("{} {} WS?", quoted(&tool.name), self.marker("<tool_sep:opensource>"))
            }
            ToolFamily::MinimaxM2 => quoted(&format!("<invoke name=\"{}\">", tool.name)) + " WS?",
            family if has_dsml(family) => {
                self.tag(&format!("<{DSML}invoke name=\"{}\">", tool.name)) + " WS?"
            }
            _ => quoted(&tool.name) + " WS?",
        };
        for param in &params.list {
            let optional = if param.required { "" } else { "?" };
            if has_dsml(family) {
                let told = self.told_param(&Key::Known(param.name), &params.schema(param))?;
                let _ = write!(body, " ({told} WS?){optional}");
                continue;
            }
            let key = self.param_key(family, &Key::Known(param.name));
            let value = self.param_value(family, &params.schema(param))?;
            let _ = write!(body, " ({key} {value} WS?){optional}");
        }
        if let Some(rest) = params.rest() {
            let argument = if has_dsml(family) {
                self.told_param(&Key::Any, &rest)?
            } else {
                let value = self.param_value(family, &rest)?;
                format!("{} {value}", self.param_key(family, &Key::Any))
            };
            let _ = write!(body, " ({argument} WS?)*");
        }
        match family {
            ToolFamily::QwenXml | ToolFamily::SeedXml => body.push_str(" \"</function>\""),
            ToolFamily::MinimaxM2 => body.push_str(" \"</invoke>\""),
            family if has_dsml(family) => {
                let _ = write!(body, " {}", self.tag(&format!("</{DSML}invoke>")));
            }
            _ => {}
        }
        Ok(body)
    }

    /// What stands before an argument's value.
    fn param_key(&self, family: ToolFamily, key: &Key<'_>) -> String {
        match family {
            ToolFamily::QwenXml => key.between("<parameter=", ">\n"),
            ToolFamily::SeedXml => key.between("<parameter=", ">"),
            ToolFamily::MinimaxM2 => key.between("<parameter name=\"", "\">"),
            family => {
                let own = if family == ToolFamily::HunyuanXml { ":opensource" } else { "" };
                let marker = |name: &str| self.marker(&format!("<{name}{own}>"));
                let (open, close) = (marker("arg_key"), marker("/arg_key"));
                let value = marker("arg_value");
                format!("{open} {} {close} WS? {value}", key.between("", ""))
            }
        }
    }

    /// An argument that says by itself whether it is text or JSON (DeepSeek V3.2).
    fn told_param(&mut self, key: &Key<'_>, whole: &Value) -> Result<String, SchemaError> {
        let reading = reading(Some(&Applicable::root(whole)));
        let open = self.tag(&format!("<{DSML}parameter name=\""));
        let head = |is_text: bool| {
            format!("{open} {}", key.between("", &format!("\" string=\"{is_text}\">")))
        };
        let mut alternatives = Vec::new();
        if !reading.is_json() {
            let value = self.text_value(ToolFamily::DeepseekV32, whole)?;
            alternatives.push(format!("{} {value}", head(true)));
        }
        if reading != Reading::Text {
            let value = self.json(&enforceable(whole)?);
            let (_, marker) = self.value_close(ToolFamily::DeepseekV32);
            alternatives.push(format!("{} {value} {marker}", head(false)));
        }
        Ok(format!("({})", alternatives.join(" | ")))
    }

    /// A value and the tag that closes it.
    fn param_value(&mut self, family: ToolFamily, whole: &Value) -> Result<String, SchemaError> {
        if reading(Some(&Applicable::root(whole))).is_json() {
            let (_, marker) = self.value_close(family);
            return Ok(format!("{} {marker}", self.json(&enforceable(whole)?)));
        }
        self.text_value(family, whole)
    }

    /// What closes a value: its letters, and itself in the grammar.
    fn value_close(&self, family: ToolFamily) -> (&'static str, String) {
        match family {
            ToolFamily::QwenXml => ("\n</parameter>", quoted("\n</parameter>")),
            ToolFamily::MinimaxM2 | ToolFamily::SeedXml => ("</parameter>", quoted("</parameter>")),
            ToolFamily::HunyuanXml => {
                ("</arg_value:opensource>", self.marker("</arg_value:opensource>"))
            }
            family if has_dsml(family) => {
                ("</｜DSML｜parameter>", self.tag("</｜DSML｜parameter>"))
            }
            _ => ("</arg_value>", self.marker("</arg_value>")),
        }
    }

    /// A bare text and the tag that closes it.
    fn text_value(&mut self, family: ToolFamily, whole: &Value) -> Result<String, SchemaError> {
        let (close, rule) = self.value_close(family);
        let ending = match (has_dsml(family), self.format.marker_token(DSML)) {
            (true, Some(token)) => Ending::Dsml(token),
            _ if self.format.marker_token(close).is_some() => Ending::Token,
            _ => Ending::Letters(close.replace('\n', "\\n").replace('/', "\\/")),
        };
        self.bare_text(&Close { rule, ending, forbidden: "<" }, whole)
    }

    /// A bare text and what closes it.
    pub(super) fn bare_text(
        &mut self,
        close: &Close,
        whole: &Value,
    ) -> Result<String, SchemaError> {
        let marker = &close.rule;
        let object = whole.as_object();
        let get = |key: &str| object.and_then(|object| object.get(key));
        if let Some(text) = get(BARE).and_then(Value::as_str) {
            let text = self.lark(text);
            return Ok(format!("{text} {marker}"));
        }
        if let Some(values) = get("enum").and_then(Value::as_array) {
            let texts: Vec<String> = values.iter().filter_map(Value::as_str).map(quoted).collect();
            return Ok(format!("({}) {marker}", texts.join(" | ")));
        }
        if let Some(text) = get("const").and_then(Value::as_str) {
            return Ok(format!("{} {marker}", quoted(text)));
        }
        if let Some(key) =
            object.into_iter().flat_map(Map::keys).find(|key| !FREE.contains(&key.as_str()))
        {
            let reason = "this model writes strings as bare text, where only lengths and enums can be enforced";
            return Err(SchemaError::new(key, reason));
        }
        let bounds =
            [get("minLength"), get("maxLength")].map(|bound| bound.and_then(Value::as_u64));
        Ok(match (bounds, &close.ending) {
            // Texts may hold what begins the tag; only the token within ends them.
            ([None, None], Ending::Dsml(token)) => {
                let piece = self.lazy("(?s:.*)<\\/");
                format!("{piece}+ <[{}]> \"parameter>\"", token.0)
            }
            ([None, None], Ending::Token) => format!("ANY? {marker}"),
            ([None, None], Ending::Letters(letters)) => self.lazy(&format!("(?s:.*){letters}")),
            ([min, max], _) => {
                let max = max.map_or_else(String::new, |max| max.to_string());
                // Without the first letter of tags, so that length and end cannot disagree.
                let min = min.unwrap_or(1).max(1);
                format!("/[^{}\\n]{{{min},{max}}}/ {marker}", close.forbidden)
            }
        })
    }
}

/// The name of an argument.
enum Key<'a> {
    Known(&'a str),
    /// Of a schema that names none.
    Any,
}

impl Key<'_> {
    /// The name between these letters.
    fn between(&self, before: &str, after: &str) -> String {
        match self {
            Self::Known(name) => quoted(&format!("{before}{name}{after}")),
            Self::Any => format!("{} PNAME {}", quoted(before), quoted(after)),
        }
    }
}

/// What closes a bare text.
pub(super) struct Close {
    /// Itself in the grammar.
    pub rule: String,
    pub ending: Ending,
    /// Letters that texts of a certain length may not hold.
    pub forbidden: &'static str,
}

/// What a text without bounds is told from its end by.
pub(super) enum Ending {
    /// A token, which texts cannot hold.
    Token,
    /// DeepSeek's token within the tag.
    Dsml(TokenId),
    /// An expression of its letters.
    Letters(String),
}

/// One of them.
pub(super) struct Param<'a> {
    pub name: &'a str,
    pub schema: &'a Value,
    pub required: bool,
}

/// Arguments that are written one by one, and what their references point into.
pub(super) struct Params<'a> {
    pub list: Vec<Param<'a>>,
    root: &'a Value,
}

impl<'a> Params<'a> {
    pub(super) fn of(root: &'a Value) -> Result<Self, SchemaError> {
        const PLAIN: [&str; 4] = ["type", "properties", "required", "additionalProperties"];
        let is_plain = |key: &str| PLAIN.contains(&key) || REMARKS.contains(&key);
        let Value::Object(object) = followed(root, root) else {
            return Ok(Self { list: Vec::new(), root });
        };
        if let Some(key) = object.keys().find(|key| !is_plain(key)) {
            let reason =
                "this model writes arguments one by one, so nothing can be enforced across them";
            return Err(SchemaError::new(key, reason));
        }
        let names = object.get("required").and_then(Value::as_array);
        let required: Vec<&str> = names.into_iter().flatten().filter_map(Value::as_str).collect();
        let properties = object.get("properties").and_then(Value::as_object);
        let properties = || properties.into_iter().flatten();
        if let Some(name) = required.iter().find(|name| properties().all(|(own, _)| own != *name)) {
            return Err(SchemaError::new(
                "required",
                format!("{name:?} is not among the properties"),
            ));
        }
        let list = properties().map(|(name, schema)| Param {
            name,
            schema,
            required: required.contains(&name.as_str()),
        });
        Ok(Self { list: list.collect(), root })
    }

    /// The schema of arguments that no one names, where the schema names none and says that there may be
    /// some.
    pub(super) fn rest(&self) -> Option<Value> {
        let rest = followed(self.root, self.root).get("additionalProperties")?;
        (self.list.is_empty() && *rest != Value::Bool(false)).then(|| whole(rest, self.root))
    }

    /// One argument's schema by itself.
    pub(super) fn schema(&self, param: &Param<'_>) -> Value {
        whole(param.schema, self.root)
    }
}

/// What a schema leads to, by itself: with the definitions of its root.
pub(super) fn whole(schema: &Value, root: &Value) -> Value {
    let mut schema = followed(schema, root).clone();
    if let Value::Object(object) = &mut schema {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = root.get(key) {
                object.insert(key.to_owned(), definitions.clone());
            }
        }
    }
    schema
}
