package process

import (
	"os"
	"regexp"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/rpc"
)

// certificateFlag matches the names of flags whose values are files with certificates, except the flags of the inner
// network.
var certificateFlag = regexp.MustCompile(
	`^(client-ca-file|requestheader-client-ca-file|tls-cert-file|etcd-(cert|ca)file|kubelet-certificate-authority|` +
		`kubelet-client-certificate|proxy-client-cert-file|services-(tls-cert|client-ca)-file|oidc-ca-file|` +
		`tracing-ca-file)$`)

// clientCertificate matches the client certificate's file in a kubeconfig of certgen. watchfanout links this package,
// and must not link client-go's parser.
var clientCertificate = regexp.MustCompile(`(?m)^\s*client-certificate: (\S+)$`)

// certificates describes the certificates in the files that flags name, and the identities on the inner network.
func (p *Process) certificates() (all []pki.Described) {
	if p.flags == nil {
		return nil
	}
	all = CertificatesOf(p.flags)
	for _, s := range p.services {
		id := p.identity(s.Name)
		if id.CertFile == "" {
			continue
		}
		all = append(all, certificatesOf(&id)...)
		kubeconfig, _ := s.flags.GetString("kubeconfig")
		text, _ := os.ReadFile(kubeconfig) // of a process with the gateway, it need not exist
		if m := clientCertificate.FindSubmatch(text); m != nil {
			all = append(all, pki.Describe("--kubeconfig", string(m[1]))...)
		}
	}
	return all
}

// CertificatesOf describes the certificates in the files that flags name, except the flags of the inner network.
func CertificatesOf(fs *pflag.FlagSet) (all []pki.Described) {
	fs.VisitAll(func(f *pflag.Flag) {
		path := f.Value.String()
		if path == "" || !certificateFlag.MatchString(f.Name) {
			return
		}
		described := pki.Describe("--"+f.Name, path)
		if len(described) == 0 && pki.Describable(path) {
			described = []pki.Described{{Flag: "--" + f.Name, File: path, Error: "it has no PEM certificate"}}
		}
		all = append(all, described...)
	})
	return all
}

// expirations collects when certificates expire. It reads their files at each scrape.
type expirations struct {
	certificates func() []pki.Described
}

// Expirations collects when the certificates of an identity on the inner network expire. It is for processes without
// services: xds, etcd and NATS.
func Expirations(id *rpc.TLS) prometheus.Collector {
	return expirations{func() []pki.Described { return certificatesOf(id) }}
}

// certificatesOf describes the certificates of an identity on the inner network, if it has files.
func certificatesOf(id *rpc.TLS) []pki.Described {
	if id.CertFile == "" {
		return nil
	}
	return pki.DescribeSigned("--rpc-cert-file", id.CertFile, id.CAFile)
}

var validityLabels = []string{"flag", "file", "subject"}

func newExpirations() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_certificate_expiration_timestamp_seconds",
		Help: "When the first certificate of a subject in a file expires, in seconds since 1970, by the flag that names " +
			"the file.",
	}, validityLabels)
}

func newStarts() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_certificate_not_before_timestamp_seconds",
		Help: "When the validity of the same certificate begins, in seconds since 1970, by the flag that names the file.",
	}, validityLabels)
}

// Describe implements prometheus.Collector.
func (e expirations) Describe(ch chan<- *prometheus.Desc) {
	newExpirations().Describe(ch)
	newStarts().Describe(ch)
}

// Collect implements prometheus.Collector.
func (e expirations) Collect(ch chan<- prometheus.Metric) {
	type key struct{ flag, file, subject string }
	first := map[key]pki.Described{}
	for _, c := range e.certificates() {
		k := key{strings.TrimPrefix(c.Flag, "--"), c.File, c.Subject}
		if known, ok := first[k]; !c.NotAfter.IsZero() && (!ok || c.NotAfter.Before(known.NotAfter)) {
			first[k] = c
		}
	}
	ends, starts := newExpirations(), newStarts()
	for k, c := range first {
		ends.WithLabelValues(k.flag, k.file, k.subject).Set(float64(c.NotAfter.Unix()))
		starts.WithLabelValues(k.flag, k.file, k.subject).Set(float64(c.NotBefore.Unix()))
	}
	ends.Collect(ch)
	starts.Collect(ch)
}
