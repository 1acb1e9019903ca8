//! The control protocol between the front and the ranks. No I/O.
//!
//! Every connection to a rank begins with a [`Hello`]. On a control connection the rank
//! answers with [`FromRank::Identity`], and both sides then send messages at any
//! time. On a peer connection it answers with a [`PeerReply`]; frames of the group follow. On a connection for weights it asks for
//! chunks, as `shardpack_engine`'s loading defines, where it has no package of its own.
//!
//! [`FromRank::Formed`] is a fence: what rank 0 sends after it belongs to its epoch, and requests
//! submitted before it are forgotten.

use serde::{Deserialize, Serialize};
use shardpack_engine_api::{Event, GenerateRequest, LinkReport, RankVitals, RequestId};

use super::{announce::Announcement, identity::Identity, token::Token};

/// The highest version of the messages that this program speaks. Front and rank use the highest that
/// both speak; ranks of one group are of one build, and so have the same.
pub const PROTOCOL: u32 = 7;

/// The lowest.
pub(super) const LOWEST_PROTOCOL: u32 = 7;

/// The version that front and rank use: each speaks all from its lowest to its highest.
pub(super) fn common_protocol(front: [u32; 2], rank: [u32; 2]) -> Option<u32> {
    let highest = front[1].min(rank[1]);
    (highest >= front[0].max(rank[0])).then_some(highest)
}

/// The first message of a connection to a rank.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Hello {
    /// By the front.
    Control {
        /// The rank's token.
        token: Token,
        /// The lowest version that the front speaks; a rank that knows no ranges compares this alone.
        protocol: u32,
        /// The highest; absent where it is the lowest too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        highest: Option<u32>,
    },
    /// By the front, which gives the package on it: the rank asks for what it needs.
    Weights {
        /// The rank's token.
        token: Token,
    },
    /// By a rank of a higher number.
    Peer {
        /// The rank's token.
        token: Token,
        /// Which group this is for.
        epoch: u64,
        /// Who connects.
        identity: Identity,
        /// What the connection is for.
        way: StreamKind,
    },
}

impl Hello {
    /// A front's, in all versions that this program speaks.
    pub(super) fn control(token: Token) -> Self {
        let highest = (PROTOCOL > LOWEST_PROTOCOL).then_some(PROTOCOL);
        Self::Control { token, protocol: LOWEST_PROTOCOL, highest }
    }

    pub(super) fn token(&self) -> &Token {
        match self {
            Self::Control { token, .. } | Self::Weights { token } | Self::Peer { token, .. } => {
                token
            }
        }
    }
}

/// The two connections of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum StreamKind {
    /// For frames.
    Data,
    /// For abort notices.
    Farewell,
}

/// A rank's answer to a peer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum PeerReply {
    /// Frames may follow.
    Welcome(Identity),
    /// The connection is of no use; a sentence why.
    Refused(String),
}

/// What may carry the links of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkChoice {
    /// RDMA between machines that have it, else TCP.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// RDMA; a pair without it is an error.
    Rdma,
}

/// A group that is to be formed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct GroupPlan {
    /// Higher than any before.
    pub(super) epoch: u64,
    /// Where all ranks are, the receiver included, in rank order.
    pub(super) peers: Vec<Announcement>,
    /// What may carry their links; the same for all.
    pub(super) links: LinkChoice,
}

/// The front to a rank.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ToRank {
    /// Leave the present group, if any, and form this one.
    Form(GroupPlan),
    /// To rank 0: begin a request.
    Submit {
        /// Its name.
        id: RequestId,
        /// What to do.
        request: Box<GenerateRequest>,
    },
    /// To rank 0: end a request.
    Cancel(RequestId),
    /// Nothing new, but the front lives; sent every second.
    Alive,
    /// End the process.
    Shutdown,
}

/// A rank to the front.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromRank {
    /// The first message: who this is.
    Identity(Identity),
    /// Instead of it: a sentence why there is no connection.
    Refused(String),
    /// Nothing new, but the process runs.
    Alive,
    /// How much memory the process takes, and how long its steps are.
    Vitals(RankVitals),
    /// How far loading has come.
    Progress(Progress),
    /// Loading is done; the rank waits to form a group.
    Loaded {
        /// The latest epoch that an earlier front of the rank has used; groups of this one have later
        /// ones.
        epoch: u64,
    },
    /// The group of this epoch works.
    Formed {
        /// Which.
        epoch: u64,
        /// This rank's links to those of higher numbers.
        links: Vec<LinkReport>,
    },
    /// By rank 0: something happened to a request.
    Event(Event),
    /// The group of this epoch could not be formed or broke.
    GroupLost {
        /// Which.
        epoch: u64,
        /// Whose fault it was, as far as this rank saw.
        rank: Option<u32>,
        /// What was seen of that rank, for people.
        reason: String,
    },
    /// The rank can do nothing more; a sentence why.
    Failed(String),
}

/// How far a rank's loading has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What is being done, such as `reading weights`.
    pub doing: String,
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes to do; 0 where that is not known.
    pub total_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardpack_engine_api::{Sampling, TokenId};

    #[test]
    fn messages_stand_as_documented() {
        let check = |message: &ToRank, json: &str| {
            assert_eq!(serde_json::to_string(message).unwrap(), json);
            let parsed: ToRank = serde_json::from_str(json).unwrap();
            assert_eq!(serde_json::to_string(&parsed).unwrap(), json);
        };
        let logit_bias = vec![(TokenId(4), -1.5)];
        let sampling =
            Sampling { temperature: 0.1, seed: u64::MAX, logit_bias, ..Sampling::GREEDY };
        let (prompt, stop_tokens) = (vec![TokenId(1), TokenId(2)], vec![TokenId(3)]);
        let request =
            GenerateRequest { stop_tokens, sampling, ..GenerateRequest::greedy(prompt, 5) };
        check(
            &ToRank::Submit { id: RequestId(7), request: Box::new(request) },
            r#"{"submit":{"id":7,"request":{"prompt":[1,2],"max_tokens":5,"min_tokens":0,"stop_tokens":[3],"sampling":{"temperature":0.1,"top_k":0,"top_p":1.0,"min_p":0.0,"repetition_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"logit_bias":[[4,-1.5]],"seed":18446744073709551615},"logprobs":null,"constraint":null,"timeout_ms":null}}}"#,
        );
        check(&ToRank::Cancel(RequestId(7)), r#"{"cancel":7}"#);
        check(&ToRank::Shutdown, r#""shutdown""#);
        let event = Event::Token { request: RequestId(7), token: TokenId(9), logprobs: None };
        assert_eq!(
            serde_json::to_string(&FromRank::Event(event)).unwrap(),
            r#"{"event":{"event":"token","request":7,"token":9,"logprobs":null}}"#
        );
        for bad in ["\"sing\"", "{}", r#"{"cancel":-1}"#, r#"{"submit":{"id":1}}"#] {
            serde_json::from_str::<ToRank>(bad).unwrap_err();
        }
    }
}
