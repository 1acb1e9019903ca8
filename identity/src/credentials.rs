//! A machine's certificate, and how it verifies the certificates of others: TLS 1.3 only, signed by
//! the cluster's authority only, then the role, then the key.

use std::{fmt, sync::Arc};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError,
    RootCertStore, ServerConfig, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor, verify_server_name,
    },
    crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
    server::{
        NoServerSessionStorage, ParsedCertificate,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    version::TLS13,
};

use crate::{Authority, CredentialsError, PeerKey, Role, Validity, certificate};

/// What a connection is for; it is settled in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// A node joins a cluster.
    Join,
    /// A controller renews or ends a membership.
    Member,
    /// A controller pushes, asks, and starts ranks.
    Transfer,
    /// A front or another rank.
    Rank,
    /// Another node fetches files that a push gives both.
    Relay,
}

impl Service {
    const ALL: [Self; 5] = [Self::Join, Self::Member, Self::Transfer, Self::Rank, Self::Relay];

    /// Its name in the handshake (ALPN).
    pub(crate) const fn protocol(self) -> &'static [u8] {
        match self {
            Self::Join => b"shardpack-join/1",
            Self::Member => b"shardpack-member/1",
            Self::Transfer => b"shardpack-transfer/1",
            Self::Rank => b"shardpack-rank/1",
            Self::Relay => b"shardpack-relay/1",
        }
    }

    pub(crate) fn of_protocol(protocol: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|service| service.protocol() == protocol)
    }
}

/// A certificate that is the cluster's, but not of whom it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Mismatch {
    #[error("its certificate is not a {}'s", expected.name())]
    Role { expected: Role },
    #[error("its key is {found}, expected {expected}")]
    Key { expected: PeerKey, found: PeerKey },
    #[error("its key is not an Ed25519 key")]
    Kind,
}

/// The peer of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The role in its certificate; none for a node that has not joined.
    pub role: Option<Role>,
    /// Its key.
    pub key: PeerKey,
}

/// The peer that a caller expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedPeer {
    /// The role that its certificate must have.
    pub role: Role,
    /// Its key, if only one may answer.
    pub key: Option<PeerKey>,
}

/// A certificate with its key, and the authority by which others are verified.
#[derive(Clone)]
pub struct Credentials {
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: Arc<PrivatePkcs8KeyDer<'static>>,
    public: PeerKey,
    mandate: Option<Arc<str>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({})", self.public)
    }
}

impl Credentials {
    /// The holder of `certificate`, signed by `authority` for the key in `pkcs8`.
    pub fn new(
        authority: &[u8],
        certificate: &[u8],
        pkcs8: &[u8],
    ) -> Result<Self, CredentialsError> {
        let public = PeerKey::of_pair(&certificate::parse_key(pkcs8)?);
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from(authority.to_vec());
        roots.add(authority).map_err(CredentialsError::Use)?;
        let chain = vec![CertificateDer::from(certificate.to_vec())];
        let key = Arc::new(PrivatePkcs8KeyDer::from(pkcs8.to_vec()));
        Ok(Self { roots: Arc::new(roots), chain, key, public, mandate: None })
    }

    /// The same, with the mandate of the controller that they are of, as text.
    pub(crate) fn presenting(self, mandate: &str) -> Self {
        Self { mandate: Some(mandate.into()), ..self }
    }

    /// The mandate to be shown to nodes, a [`crate::SignedMandate`] as JSON; none before the first
    /// handover.
    #[must_use]
    pub fn mandate(&self) -> Option<&str> {
        self.mandate.as_deref()
    }

    /// The public key.
    #[must_use]
    pub const fn key(&self) -> PeerKey {
        self.public
    }

    /// Whether others of the cluster would accept this certificate in this role.
    pub(crate) fn check_own(&self, role: Role) -> Result<(), CredentialsError> {
        let verifier = self.verifier(vec![role], Some(self.public));
        verifier.check(&self.chain[0], &[], UnixTime::now()).map_err(CredentialsError::Use)
    }

    /// Whether a certificate is of this cluster and in this role at that moment.
    pub(crate) fn check_other(
        &self,
        certificate: &CertificateDer<'_>,
        role: Role,
        at: UnixTime,
    ) -> Result<(), rustls::Error> {
        self.verifier(vec![role], None).check(certificate, &[], at)
    }

    /// The certificate.
    pub(crate) fn certificate(&self) -> &CertificateDer<'static> {
        &self.chain[0]
    }

    /// The private key.
    pub(crate) fn pkcs8(&self) -> &[u8] {
        self.key.secret_pkcs8_der()
    }

    fn verifier(&self, roles: Vec<Role>, key: Option<PeerKey>) -> PeerVerifier {
        let algorithms = provider().signature_verification_algorithms;
        PeerVerifier { roots: Some(Arc::clone(&self.roots)), roles, key, algorithms }
    }

    /// For connecting to a member, which must be the `expected` one.
    pub(crate) fn client(
        &self,
        service: Service,
        expected: ExpectedPeer,
    ) -> Result<Arc<ClientConfig>, CredentialsError> {
        let ExpectedPeer { role, key } = expected;
        let verifier = match key {
            // So that a certificate that has ended can be renewed.
            Some(key) if service == Service::Member => PeerVerifier::of_key(key),
            _ => self.verifier(vec![role], key),
        };
        let config = client_builder(Arc::new(verifier))?
            .with_client_auth_cert(self.chain.clone(), self.private_key())
            .map_err(CredentialsError::Use)?;
        Ok(finish_client(config, service))
    }

    /// For answering members in one of `roles`.
    pub(crate) fn server(
        &self,
        services: &[Service],
        roles: &[Role],
    ) -> Result<Arc<ServerConfig>, CredentialsError> {
        let verifier = Arc::new(self.verifier(roles.to_vec(), None));
        let config = server_builder()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain.clone(), self.private_key())
            .map_err(CredentialsError::Use)?;
        Ok(finish_server(config, services))
    }

    fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.key.clone_key())
    }
}

impl Authority {
    /// A member whose key is made here and kept in memory: for measurements and tests, since
    /// members make their own.
    pub fn issue(&self, role: Role, validity: Validity) -> Result<Credentials, CredentialsError> {
        let key = certificate::generate_key()?;
        let certificate = self.sign(role, role.name(), PeerKey::of_pair(&key), validity)?;
        Credentials::new(&self.certificate()?, &certificate, key.serialized_der())
    }
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

type ClientBuilder = rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>;

fn client_builder(verifier: Arc<PeerVerifier>) -> Result<ClientBuilder, CredentialsError> {
    Ok(ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(CredentialsError::Use)?
        .dangerous()
        .with_custom_certificate_verifier(verifier))
}

fn server_builder()
-> Result<rustls::ConfigBuilder<ServerConfig, rustls::WantsVerifier>, CredentialsError> {
    ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(CredentialsError::Use)
}

fn finish_client(mut config: ClientConfig, service: Service) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![service.protocol().to_vec()];
    // Names are not compared, and every connection is verified anew.
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    Arc::new(config)
}

fn finish_server(mut config: ServerConfig, services: &[Service]) -> Arc<ServerConfig> {
    config.alpn_protocols = services.iter().map(|it| it.protocol().to_vec()).collect();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Arc::new(config)
}

/// For calling a node that has not joined, known by its key only; the caller stays unknown.
pub(crate) fn client_of_stranger(key: PeerKey) -> Result<Arc<ClientConfig>, CredentialsError> {
    let config = client_builder(Arc::new(PeerVerifier::of_key(key)))?.with_no_client_auth();
    Ok(finish_client(config, Service::Join))
}

/// For answering as a node that has not joined: the caller must send the token afterwards.
pub(crate) fn server_of_stranger(pkcs8: &[u8]) -> Result<Arc<ServerConfig>, CredentialsError> {
    let certificate = certificate::self_signed(&certificate::parse_key(pkcs8)?)?;
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pkcs8.to_vec()));
    let config = server_builder()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .map_err(CredentialsError::Use)?;
    Ok(finish_server(config, &[Service::Join]))
}

/// The peer of a verified certificate.
pub(crate) fn peer_of(certificate: &CertificateDer<'_>) -> Option<Peer> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    let key = PeerKey::of_spki(&parsed.subject_public_key_info())?;
    let has = |role: &Role| verify_server_name(&parsed, &role.server_name()).is_ok();
    Some(Peer { role: Role::ALL.into_iter().find(has), key })
}

/// Verifies peer certificates.
#[derive(Debug)]
struct PeerVerifier {
    /// The cluster's authority; none where only the key counts.
    roots: Option<Arc<RootCertStore>>,
    /// Any of these; empty where only the key counts.
    roles: Vec<Role>,
    key: Option<PeerKey>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl PeerVerifier {
    /// The key counts and nothing else.
    fn of_key(key: PeerKey) -> Self {
        let algorithms = provider().signature_verification_algorithms;
        Self { roots: None, roles: Vec::new(), key: Some(key), algorithms }
    }

    fn check(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let parsed = ParsedCertificate::try_from(certificate)?;
        if let Some(roots) = &self.roots {
            verify_server_cert_signed_by_trust_anchor(
                &parsed,
                roots,
                intermediates,
                now,
                self.algorithms.all,
            )?;
        }
        let has = |role: &Role| verify_server_name(&parsed, &role.server_name()).is_ok();
        if let Some(expected) = self.roles.first()
            && !self.roles.iter().any(has)
        {
            return Err(mismatch(Mismatch::Role { expected: *expected }));
        }
        let found = PeerKey::of_spki(&parsed.subject_public_key_info());
        let found = found.ok_or_else(|| mismatch(Mismatch::Kind))?;
        match self.key {
            Some(expected) if expected != found => Err(mismatch(Mismatch::Key { expected, found })),
            _ => Ok(()),
        }
    }

    fn check_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }
}

fn mismatch(mismatch: Mismatch) -> rustls::Error {
    CertificateError::Other(OtherError(Arc::new(mismatch))).into()
}

/// TLS 1.2 is not offered.
fn no_tls12() -> rustls::Error {
    rustls::Error::General("TLS 1.2 is not spoken".to_owned())
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(end_entity, intermediates, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

impl ClientCertVerifier for PeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(end_entity, intermediates, now).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}
