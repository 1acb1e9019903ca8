//! What a running server says of itself over HTTP (`/health`, `/stats`, `/metrics`, its models), and what
//! it is asked to do with its models.

use std::{env, fs, path::Path, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use serde_json::Value;

/// Holds the API key of a server, where no file is named that does.
const KEY_VARIABLE: &str = "SHARDPACK_API_KEY";

/// A server, and the key that it wants.
#[derive(Clone)]
pub(crate) struct ServerClient {
    base: String,
    key: Option<String>,
    agent: ureq::Agent,
}

impl ServerClient {
    /// The server at `url`, with or without `/v1`, which has `timeout` for each answer.
    pub(crate) fn at(url: &str, key: Option<&Path>, timeout: Duration) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(timeout))
            .build()
            .into();
        let read =
            |file: &Path| fs::read_to_string(file).with_context(|| file.display().to_string());
        let key = match key {
            Some(file) => Some(read(file)?),
            None => env::var(KEY_VARIABLE).ok(),
        };
        let key = key.map(|key| key.trim().to_owned()).filter(|key| !key.is_empty());
        Ok(Self { base, key, agent })
    }

    /// Its URL, without a path.
    pub(crate) fn url(&self) -> &str {
        &self.base
    }

    /// Host and port, as labels and tables name it.
    pub(crate) fn host(&self) -> &str {
        self.base.split_once("://").map_or(self.base.as_str(), |(_, host)| host)
    }

    /// `/health`, which is an answer too where the server is not well.
    pub(crate) fn health(&self) -> anyhow::Result<Value> {
        let (status, text) = self.get("/health")?;
        let health: Value = self.parse("/health", &text)?;
        if !health["state"].is_string() {
            bail!("{}/health: HTTP {status} without a state; is it a shardpack server?", self.base);
        }
        Ok(health)
    }

    /// `/stats`.
    pub(crate) fn stats(&self) -> anyhow::Result<Value> {
        let text = self.get_well("/stats")?;
        self.parse("/stats", &text)
    }

    /// `/metrics`.
    pub(crate) fn metrics(&self) -> anyhow::Result<String> {
        self.get_well("/metrics")
    }

    /// `/v1/usage` with a query.
    pub(crate) fn usage(&self, query: &str) -> anyhow::Result<String> {
        self.get_well(&format!("/v1/usage?{query}"))
    }

    /// A model, with all that the server says of it.
    pub(crate) fn model(&self, name: &str) -> anyhow::Result<Value> {
        let path = format!("/v1/models/{}", escaped(name));
        let (status, text) = self.get(&path)?;
        self.answer(&path, status, &text)
    }

    /// Asks for something to be done, and waits until it is, for at most `timeout`.
    pub(crate) fn post(
        &self,
        path: &str,
        body: &Value,
        timeout: Duration,
    ) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.base);
        let request = self.agent.post(&url);
        let mut request = request.config().timeout_global(Some(timeout)).build();
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request
            .content_type("application/json")
            .send(body.to_string())
            .with_context(|| url.clone())?;
        let status = response.status().as_u16();
        let text = response.body_mut().read_to_string().with_context(|| url)?;
        self.answer(path, status, &text)
    }

    /// What was answered, or the server's own words on why it was not.
    fn answer(&self, path: &str, status: u16, text: &str) -> anyhow::Result<Value> {
        let answer = self.parse(path, text);
        match (status, answer) {
            (200, answer) => answer,
            (401 | 403, Ok(answer)) => Err(anyhow!(
                "{}: give a key with --key FILE or in {KEY_VARIABLE}",
                answer["error"]["message"].as_str().unwrap_or("the server wants another key"),
            )),
            (_, Ok(answer)) if answer["error"]["message"].is_string() => {
                bail!("{}", answer["error"]["message"].as_str().unwrap_or_default())
            }
            _ => bail!("{}{path}: HTTP {status}, expected 200: {}", self.base, text.trim()),
        }
    }

    fn parse(&self, path: &str, text: &str) -> anyhow::Result<Value> {
        serde_json::from_str(text).with_context(|| format!("{}{path}: not JSON", self.base))
    }

    fn get_well(&self, path: &str) -> anyhow::Result<String> {
        let (status, text) = self.get(path)?;
        match status {
            200 => Ok(text),
            401 | 403 => bail!(
                "{}{path}: HTTP {status}, the server wants a key; give its file with --key, or the key in {KEY_VARIABLE}",
                self.base
            ),
            _ => bail!("{}{path}: HTTP {status}, expected 200: {}", self.base, text.trim()),
        }
    }

    fn get(&self, path: &str) -> anyhow::Result<(u16, String)> {
        let url = format!("{}{path}", self.base);
        let mut request = self.agent.get(&url);
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.call().with_context(|| url.clone())?;
        let status = response.status().as_u16();
        let text = response.body_mut().read_to_string().with_context(|| url)?;
        Ok((status, text))
    }
}

/// A name as a part of a URL's path.
fn escaped(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~/:@".contains(&byte);
    name.bytes().fold(String::new(), |mut text, byte| {
        if plain(byte) {
            text.push(char::from(byte));
        } else {
            use std::fmt::Write as _;
            // Writing to a string cannot fail.
            let _ = write!(text, "%{byte:02X}");
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn names_stand_in_paths_as_they_are_or_escaped() {
        assert_eq!(escaped("org/model-4bit"), "org/model-4bit");
        assert_eq!(escaped("a b?c#é%"), "a%20b%3Fc%23%C3%A9%25");
    }
}
