//! TLS handshakes within a deadline and a byte limit, and their errors.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    sync::Arc,
    time::{Duration, Instant},
};

use rustls::{
    AlertDescription, CertificateError, Connection, Error, InvalidMessage, PeerIncompatible,
    ServerConfig, ServerConnection,
    server::{AcceptedAlert, Acceptor},
};

use crate::{Service, certificate::date, credentials::Mismatch};

/// Most bytes of the peer's handshake; ours have about one thousand.
const MAX_HANDSHAKE_BYTES: usize = 32 << 10;

/// Interval between two checks whether the handshake has been cancelled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The limits of a handshake: a deadline, and a way to cancel it.
#[derive(Clone, Copy)]
pub struct HandshakeDeadline<'a> {
    /// The moment by which it must be complete.
    pub at: Instant,
    /// Whether it has been cancelled.
    pub is_cancelled: &'a dyn Fn() -> bool,
}

impl HandshakeDeadline<'_> {
    /// A deadline `timeout` from now, which is not cancelled.
    #[must_use]
    pub fn after(timeout: Duration) -> Self {
        Self { at: Instant::now() + timeout, is_cancelled: &|| false }
    }

    pub(crate) fn slice(&self) -> io::Result<Duration> {
        let left = self.at.saturating_duration_since(Instant::now());
        if left.is_zero() || (self.is_cancelled)() {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(left.min(POLL_INTERVAL))
    }
}

/// A socket whose reads and writes fail at the deadline, however slowly bytes arrive.
pub(crate) struct DeadlineStream<'a>(pub(crate) &'a TcpStream, pub(crate) HandshakeDeadline<'a>);

fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            self.0.set_read_timeout(Some(self.1.slice()?))?;
            match (&mut &*self.0).read(into) {
                Err(error) if waits(&error) => {}
                result => return result,
            }
        }
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.0.set_write_timeout(Some(self.1.slice()?))?;
            match (&mut &*self.0).write(bytes) {
                Err(error) if waits(&error) => {}
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why a handshake failed. The messages follow the peer's name, and say what to do.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Too slow.
    #[error("it did not complete the TLS handshake in time: is the program at that port a node?")]
    Timeout,
    /// It hung up.
    #[error(
        "it closed the connection during the TLS handshake: a node limits unauthenticated connections, and a node without TLS closes at once"
    )]
    Closed,
    /// The socket failed.
    #[error("the connection failed during the TLS handshake: {0}")]
    Io(io::Error),
    /// It sent more than any handshake has.
    #[error("it sent more than {MAX_HANDSHAKE_BYTES} bytes of TLS handshake")]
    TooLarge,
    /// Something else than TLS 1.3.
    #[error(
        "it does not speak TLS 1.3: a node on a loopback address uses plain TCP unless it is started with --tls"
    )]
    NotTls,
    /// Its certificate is of another authority.
    #[error(
        "it is a member of another cluster: join it again (`shardpack node --reset`, then `shardpack cluster add`), or select its cluster with --cluster"
    )]
    OtherCluster,
    /// Its certificate has ended.
    #[error("its certificate has expired and is no longer valid{}: run `shardpack cluster renew`; if the certificate is new, the clock of one of the two machines is wrong", since(*.until))]
    Expired {
        /// Since when, in seconds since 1970, where that is known.
        until: Option<u64>,
    },
    /// Its certificate has not begun.
    #[error(
        "its certificate is not valid yet: the clocks of the two machines differ by days; set them and try again"
    )]
    NotYetValid,
    /// It is of the cluster, but not who it should be.
    #[error("{0}")]
    Mismatch(String),
    /// It has not joined.
    #[error(
        "it has not joined a cluster, or has left it: run the `shardpack cluster add` command that it printed when it started"
    )]
    NotJoined,
    /// It needs no token.
    #[error(
        "it is in a cluster already: to remove it from that cluster, stop it and start it with --reset"
    )]
    AlreadyJoined,
    /// It knows another cluster.
    #[error(
        "it refused this machine's certificate because it is of another cluster: join it again (`shardpack node --reset`, then `shardpack cluster add`), or select its cluster with --cluster"
    )]
    RefusedCluster,
    /// It refused this machine's certificate as expired or not yet valid.
    #[error(
        "it refused this machine's certificate as expired or not yet valid: compare the clocks of the two machines, then run `shardpack cluster renew`"
    )]
    RefusedTime,
    /// This machine may not do that there.
    #[error(
        "it refused this machine's role: nodes accept commands only from the cluster's controllers"
    )]
    RefusedRole,
    /// It wants to see a certificate.
    #[error("it requires a client certificate of its cluster: this machine is not a member")]
    CertificateRequired,
    /// Anything else.
    #[error("the TLS handshake failed: {0}")]
    Tls(Error),
}

fn since(moment: Option<u64>) -> String {
    moment.map(|moment| format!(" since {}", date(moment))).unwrap_or_default()
}

impl HandshakeError {
    fn of_io(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Self::Timeout,
            ErrorKind::UnexpectedEof
            | ErrorKind::ConnectionReset
            | ErrorKind::ConnectionAborted
            | ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Io(error),
        }
    }

    fn of_tls(error: Error, service: Option<Service>) -> Self {
        match error {
            Error::AlertReceived(alert) => Self::of_alert(alert, service),
            Error::InvalidCertificate(problem) => Self::of_certificate(problem),
            Error::InvalidMessage(
                InvalidMessage::InvalidContentType
                | InvalidMessage::UnknownProtocolVersion
                | InvalidMessage::MessageTooLarge
                | InvalidMessage::InvalidEmptyPayload,
            )
            | Error::PeerIncompatible(
                PeerIncompatible::Tls13RequiredForQuic
                | PeerIncompatible::ServerDoesNotSupportTls12Or13
                | PeerIncompatible::SupportedVersionsExtensionRequired,
            ) => Self::NotTls,
            Error::NoApplicationProtocol if service == Some(Service::Join) => Self::AlreadyJoined,
            Error::PeerIncompatible(
                PeerIncompatible::NoCertificateRequestSignatureSchemesInCommon,
            )
            | Error::NoCertificatesPresented => {
                Self::Mismatch("it showed no certificate".to_owned())
            }
            other => Self::Tls(other),
        }
    }

    fn of_certificate(problem: CertificateError) -> Self {
        match problem {
            CertificateError::Expired => Self::Expired { until: None },
            CertificateError::ExpiredContext { not_after, .. } => {
                Self::Expired { until: Some(not_after.as_secs()) }
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Self::NotYetValid
            }
            CertificateError::Other(other) => {
                let text = other.0.to_string();
                match other.0.downcast_ref::<Mismatch>() {
                    Some(Mismatch::Key { .. }) => Self::Mismatch(format!(
                        "{text}: another node answers there; if the machine was set up again, run `shardpack cluster remove` and `shardpack cluster add`"
                    )),
                    _ => Self::Mismatch(text),
                }
            }
            // An authority of the same id with another key is another cluster too.
            _ => Self::OtherCluster,
        }
    }

    fn of_alert(alert: AlertDescription, service: Option<Service>) -> Self {
        match alert {
            AlertDescription::NoApplicationProtocol if service == Some(Service::Join) => {
                Self::AlreadyJoined
            }
            AlertDescription::NoApplicationProtocol => Self::NotJoined,
            AlertDescription::UnknownCA | AlertDescription::DecryptError => Self::RefusedCluster,
            AlertDescription::CertificateExpired => Self::RefusedTime,
            AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
                Self::RefusedRole
            }
            AlertDescription::CertificateRequired => Self::CertificateRequired,
            AlertDescription::ProtocolVersion => Self::NotTls,
            other => Self::Tls(Error::AlertReceived(other)),
        }
    }
}

/// Reads a caller's first message and begins the handshake with the configuration that `choose` names
/// for the service which the caller asks for: each has callers of its own.
pub(crate) fn accept(
    socket: &TcpStream,
    deadline: HandshakeDeadline<'_>,
    choose: &dyn Fn(Option<Service>) -> Arc<ServerConfig>,
) -> Result<ServerConnection, HandshakeError> {
    let mut stream = DeadlineStream(socket, deadline);
    let refuse = |(error, mut alert): (Error, AcceptedAlert), stream: &mut DeadlineStream<'_>| {
        // The other side may not listen any more.
        let _ = alert.write_all(stream);
        HandshakeError::of_tls(error, None)
    };
    let mut acceptor = Acceptor::default();
    let mut received_bytes = 0;
    loop {
        match acceptor.accept() {
            Ok(Some(accepted)) => {
                let asked = accepted.client_hello();
                let service = asked.alpn().and_then(|mut it| it.find_map(Service::of_protocol));
                let config = choose(service);
                return accepted.into_connection(config).map_err(|it| refuse(it, &mut stream));
            }
            Ok(None) => {}
            Err(refused) => return Err(refuse(refused, &mut stream)),
        }
        let count = acceptor.read_tls(&mut stream).map_err(HandshakeError::of_io)?;
        received_bytes += count;
        if count == 0 {
            return Err(HandshakeError::Closed);
        }
        if received_bytes > MAX_HANDSHAKE_BYTES {
            return Err(HandshakeError::TooLarge);
        }
    }
}

/// Completes a handshake. The calling side passes the requested `service`.
pub(crate) fn drive(
    socket: &TcpStream,
    session: &mut Connection,
    deadline: HandshakeDeadline<'_>,
    service: Option<Service>,
) -> Result<(), HandshakeError> {
    let mut stream = DeadlineStream(socket, deadline);
    let mut received_bytes = 0;
    loop {
        while session.wants_write() {
            session.write_tls(&mut stream).map_err(HandshakeError::of_io)?;
        }
        if !session.is_handshaking() {
            return Ok(());
        }
        received_bytes += process(&mut stream, session, service)?;
        if received_bytes > MAX_HANDSHAKE_BYTES {
            return Err(HandshakeError::TooLarge);
        }
    }
}

/// Processes received bytes; sends an alert to the peer if they are refused.
fn process(
    stream: &mut DeadlineStream<'_>,
    session: &mut Connection,
    service: Option<Service>,
) -> Result<usize, HandshakeError> {
    let count = session.read_tls(stream).map_err(HandshakeError::of_io)?;
    if count == 0 {
        return Err(HandshakeError::Closed);
    }
    session.process_new_packets().map_err(|error| {
        // The other side may not listen any more.
        while session.wants_write() && session.write_tls(stream).is_ok() {}
        HandshakeError::of_tls(error, service)
    })?;
    Ok(count)
}

/// First byte from the answering side: it has accepted the caller's certificate. In TLS 1.3 the
/// caller's handshake completes before that.
pub(crate) const WELCOME: u8 = 1;

/// Waits for the welcome.
pub(crate) fn await_welcome(
    socket: &TcpStream,
    session: &mut Connection,
    deadline: HandshakeDeadline<'_>,
    service: Service,
) -> Result<(), HandshakeError> {
    let mut stream = DeadlineStream(socket, deadline);
    let mut received_bytes = 0;
    loop {
        let mut word = [0];
        match session.reader().read(&mut word) {
            Ok(1) if word[0] == WELCOME => return Ok(()),
            Ok(1) => return Err(HandshakeError::NotTls),
            Ok(_) => return Err(HandshakeError::Closed),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(HandshakeError::of_io(error)),
        }
        received_bytes += process(&mut stream, session, Some(service))?;
        if received_bytes > MAX_HANDSHAKE_BYTES {
            return Err(HandshakeError::TooLarge);
        }
    }
}
