//! Certificates: a cluster's authority signs one per controller and node. The role stands in it
//! as a DNS name, the one field besides the key that TLS libraries compare without a parser of
//! our own.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ED25519, date_time_ymd,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use serde::{Deserialize, Serialize};

use crate::PeerKey;

const DAY: u64 = 24 * 60 * 60;

/// How long a controller's or node's certificate holds: long enough that renewing is rare, short
/// enough that a machine forgotten in a drawer is not a member for ever.
const VALID_DAYS: u64 = 730;

/// How long the authority itself holds: as long as any cluster lives.
const AUTHORITY_DAYS: u64 = 30 * 365;

/// How far the clocks of two machines may be apart when a certificate is made.
const BACKDATED_DAYS: u64 = 2;

/// Keys or certificates that cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A key or certificate could not be made or read.
    #[error("the key or certificate cannot be used")]
    Make(#[source] rcgen::Error),
    /// Certificate and key do not belong together, or are not what they should be.
    #[error("the certificate and its key cannot be used")]
    Use(#[source] rustls::Error),
    /// The system gave no random bytes.
    #[error("the system gave no random bytes")]
    Random(#[source] getrandom::Error),
}

/// What a machine may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Pushes, activates, starts ranks, renews and removes.
    Controller,
    /// Holds packages and runs ranks, as controllers tell it to.
    Node,
    /// Starts ranks and connects to them: a server that a controller has a node run.
    Front,
}

impl Role {
    pub(crate) const ALL: [Self; 3] = [Self::Controller, Self::Node, Self::Front];

    /// The role's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Node => "node",
            Self::Front => "front",
        }
    }

    const fn dns_name(self) -> &'static str {
        match self {
            Self::Controller => "controller.role.shardpack.internal",
            Self::Node => "node.role.shardpack.internal",
            Self::Front => "front.role.shardpack.internal",
        }
    }

    pub(crate) fn server_name(self) -> ServerName<'static> {
        ServerName::try_from(self.dns_name()).expect("the roles' names are DNS names")
    }
}

/// From when to when a certificate holds, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first second.
    pub from: u64,
    /// The last one.
    pub until: u64,
}

impl Validity {
    /// Of a member's certificate made now.
    #[must_use]
    pub fn from_now() -> Self {
        Self::days(VALID_DAYS)
    }

    fn days(days: u64) -> Self {
        let now = now();
        Self { from: now.saturating_sub(BACKDATED_DAYS * DAY), until: now + days * DAY }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// The day of a moment in seconds since 1970, as `2028-11-22`.
#[must_use]
pub fn date(seconds: u64) -> String {
    // Days are counted from the first of March of year 0, so that leap days end years
    // (Howard Hinnant, "chrono-compatible low-level date algorithms").
    let days = seconds / DAY + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + u64::from(month <= 2))
}

/// Makes a key pair.
pub(crate) fn generate_key() -> Result<KeyPair, CredentialsError> {
    KeyPair::generate_for(&PKCS_ED25519).map_err(CredentialsError::Make)
}

/// Reads a key pair from PKCS #8.
pub(crate) fn parse_key(pkcs8: &[u8]) -> Result<KeyPair, CredentialsError> {
    KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(pkcs8), &PKCS_ED25519)
        .map_err(CredentialsError::Make)
}

/// Signs the certificates of one cluster.
pub struct Authority {
    cluster: String,
    key: KeyPair,
}

impl Authority {
    /// The authority of a new cluster with this id.
    pub fn generate(cluster: &str) -> Result<Self, CredentialsError> {
        Ok(Self::new(cluster.to_owned(), generate_key()?))
    }

    /// The authority of the cluster with this id, by its key.
    pub(crate) const fn new(cluster: String, key: KeyPair) -> Self {
        Self { cluster, key }
    }

    /// Its own certificate, to be made once and kept: it is what members trust.
    pub(crate) fn certificate(&self) -> Result<CertificateDer<'static>, CredentialsError> {
        let made = self.params().self_signed(&self.key).map_err(CredentialsError::Make)?;
        Ok(made.der().clone())
    }

    fn params(&self) -> CertificateParams {
        let mut params = CertificateParams::default();
        // Its id is in the name: certificates of two clusters are told apart by their issuer.
        params.distinguished_name = common_name(&format!("shardpack cluster {}", self.cluster));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        hold(&mut params, Validity::days(AUTHORITY_DAYS));
        params
    }

    /// A certificate for the holder of `key`.
    pub fn sign(
        &self,
        role: Role,
        name: &str,
        key: PeerKey,
        validity: Validity,
    ) -> Result<CertificateDer<'static>, CredentialsError> {
        let mut params =
            CertificateParams::new([role.dns_name().to_owned()]).map_err(CredentialsError::Make)?;
        params.distinguished_name = common_name(name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // Who may call and who may answer is the role's matter: ranks do both.
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        hold(&mut params, validity);
        let own = self.params();
        let issuer = Issuer::from_params(&own, &self.key);
        Ok(params.signed_by(&key, &issuer).map_err(CredentialsError::Make)?.der().clone())
    }
}

/// A self-signed certificate, which a node uses until it joins a cluster.
pub(crate) fn self_signed(key: &KeyPair) -> Result<CertificateDer<'static>, CredentialsError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name("shardpack node that has not joined");
    // Who joins compares the key and nothing else.
    let made = params.self_signed(key).map_err(CredentialsError::Make)?;
    Ok(made.der().clone())
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn hold(params: &mut CertificateParams, Validity { from, until }: Validity) {
    let moment = |seconds| date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
    params.not_before = moment(from);
    params.not_after = moment(until);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_735_689_599, "2024-12-31"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds), day);
        }
    }
}
