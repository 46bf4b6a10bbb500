// Package certgen creates and renews the certificates and keys of a Watershed installation. These are the PKI of the
// served cluster, with kubeadm's file names, and the identities of the services on the inner network.
//
// It never replaces an existing CA or key. It renews a leaf well before it expires, and the processes that use the leaf
// reload it. Renew runs in one goroutine; Open and Issue must return before it starts.
//
// Review notes:
//
//   - Never sign a client certificate of the cluster with the inner CA, except those of authn, authz, admission and
//     registry. The inner CA authenticates services, so clients of the cluster must not obtain its certificates.
//   - Never create new CAs while Secrets of pods exist (checkNoPodSecrets).
//   - A pod's Secret holds no key of a CA, and only the identities of the services in its process (podSecrets).
package certgen

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"k8s.io/client-go/util/keyutil"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/rpc"
)

// PKI is a directory of certificates and keys.
type PKI struct {
	// Dir is the directory.
	Dir string
	// Gateway is the URL at which clients of the cluster reach the gateway. admin.kubeconfig uses it.
	Gateway string
	// ServicesGateway is the URL at which authn, authz, admission and registry reach the gateway. Empty: Gateway.
	ServicesGateway string
	// MountPath is the directory of the files in the pods that read a service's kubeconfig. Empty: Dir.
	MountPath string
	// Admin is the path of admin.kubeconfig. Empty: in Dir.
	Admin string
	// Hosts holds additional names and addresses of the gateway's certificate. StoreHosts holds those of etcd's
	// certificate, because clients of etcd verify its address.
	Hosts, StoreHosts []string

	// CA signs certificates of the cluster's clients. inner signs the identities of the services, which no client of
	// the cluster can obtain.
	CA, inner, frontProxy *pki.CA
	issued                []Component
}

// Open creates the missing files of the directory.
func (p *PKI) Open() (err error) {
	if p.CA, err = pki.OpenCA(p.Dir, "ca", "kubernetes"); err != nil {
		return err
	}
	if p.inner, err = pki.OpenCA(p.Dir, "inner-ca", "watershed-inner"); err != nil {
		return err
	}
	if p.frontProxy, err = pki.OpenCA(p.Dir, "front-proxy-ca", "front-proxy-ca"); err != nil {
		return err
	}
	keyFile, pubFile, err := pki.ServiceAccountKeys(p.Dir)
	if err == nil {
		err = checkPair(keyFile, pubFile)
	}
	if err != nil {
		return err
	}
	if err := pki.SecretKey(p.JetStreamKey()); err != nil {
		return err
	}
	return p.issueLeaves()
}

// checkPair returns an error if no key of pubFile verifies the signatures of keyFile.
func checkPair(keyFile, pubFile string) error {
	key, err := keyutil.PrivateKeyFromFile(keyFile)
	if err != nil {
		return fmt.Errorf("%s: %w", keyFile, err)
	}
	verifiers, err := keyutil.PublicKeysFromFile(pubFile)
	if err != nil {
		return fmt.Errorf("%s: %w", pubFile, err)
	}
	if signer, ok := key.(crypto.Signer); ok {
		if public, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); ok &&
			slices.ContainsFunc(verifiers, func(v any) bool { return public.Equal(v) }) {
			return nil
		}
	}
	return fmt.Errorf("%[1]s does not have the public key of %[2]s, so every new token would be rejected: add it with "+
		"openssl pkey -in %[2]s -pubout >> %[1]s", pubFile, keyFile)
}

// File returns the path of a file of the directory.
func (p *PKI) File(name string) string { return filepath.Join(p.Dir, name) }

// JetStreamKey returns the path of the key that encrypts the event log on disk.
func (p *PKI) JetStreamKey() string { return p.File("jetstream.key") }

// AdminKubeconfig returns the path of the administrator's kubeconfig.
func (p *PKI) AdminKubeconfig() string { return cmp.Or(p.Admin, p.File("admin.kubeconfig")) }

// Kubeconfig returns the path of the kubeconfig of authn, authz, admission or registry.
func (p *PKI) Kubeconfig(service string) string { return p.File(service + ".kubeconfig") }

// Identity returns a service's identity on the inner network.
func (p *PKI) Identity(service string) rpc.TLS {
	leaf := p.File("inner-" + service)
	return rpc.TLS{CertFile: leaf + ".crt", KeyFile: leaf + ".key", CAFile: p.inner.CertFile()}
}

// innerUsage maps each identity of the inner network to its usage: as a client, as a server, or both.
var innerUsage = map[string]pki.Usage{
	"gateway":     pki.Server | pki.Client, // server of authn, authz, admission and registry; client of the services
	"authn":       pki.Server,
	"authz":       pki.Server,
	"admission":   pki.Server,
	"registry":    pki.Server | pki.Client,
	"watchfanout": pki.Server | pki.Client,
	"etcd":        pki.Server | pki.Client, // its members call each other
	"nats":        pki.Server | pki.Client,
	"xds":         pki.Server,
}

// issueLeaves creates the missing certificates, and renews old ones.
func (p *PKI) issueLeaves() error {
	names := []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1", "10.96.0.1"}
	for _, host := range p.Hosts {
		if !slices.Contains(names, host) {
			names = append(names, host)
		}
	}
	for _, leaf := range []struct {
		ca *pki.CA
		pki.Leaf
	}{
		{p.CA, pki.Leaf{
			Name:       "apiserver",
			CommonName: "kube-apiserver",
			SANs:       names,
			Usage:      pki.Server,
		}},
		{p.CA, pki.Leaf{
			Name:          "apiserver-kubelet-client",
			CommonName:    "kube-apiserver-kubelet-client",
			Organizations: []string{"system:masters"},
			Usage:         pki.Client,
		}},
		{p.CA, pki.Leaf{
			Name:          "admin",
			CommonName:    "kubernetes-admin",
			Organizations: []string{"system:masters"},
			Usage:         pki.Client,
		}},
		{p.frontProxy, pki.Leaf{Name: "front-proxy-client", CommonName: "front-proxy-client", Usage: pki.Client}},
	} {
		if _, _, _, err := leaf.ca.Leaf(leaf.Leaf); err != nil {
			return err
		}
	}
	admin := kubeconfig{path: p.AdminKubeconfig(), leaf: "admin", user: "kubernetes-admin"}
	errs := []error{p.write(admin), p.innerLeaves(), p.clientLeaves()}
	for _, c := range slices.Clone(p.issued) {
		_, err := p.Issue(c)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// innerLeaves issues the services' certificates on the inner network.
func (p *PKI) innerLeaves() error {
	for name, usage := range innerUsage {
		sans := []string{name}
		if name == "etcd" { // its clients verify its address
			sans = append(append(sans, "localhost", "127.0.0.1"), p.StoreHosts...)
		}
		if _, _, _, err := p.inner.Leaf(pki.Leaf{
			Name:       "inner-" + name,
			CommonName: name,
			SANs:       sans,
			Usage:      usage,
		}); err != nil {
			return err
		}
	}
	return nil
}

// clientLeaves issues the certificates with which authn, authz, admission and registry call the gateway. The inner CA
// signs them and the gateway's certificate for these services, so they are independent of the cluster's PKI.
func (p *PKI) clientLeaves() error {
	for name, user := range map[string]string{
		"authn":     identity.Authn,
		"authz":     identity.Authz,
		"admission": identity.Admission,
		"registry":  identity.Registry,
	} {
		leaf := pki.Leaf{
			Name:          "client-" + name,
			CommonName:    user,
			Organizations: []string{identity.ServicesGroup},
			Usage:         pki.Client,
		}
		if _, _, _, err := p.inner.Leaf(leaf); err != nil {
			return err
		}
		own := kubeconfig{path: p.Kubeconfig(name), leaf: leaf.Name, user: user, service: true}
		if err := p.write(own); err != nil {
			return err
		}
	}
	return nil
}

// Component is a control plane program that is a user of the cluster.
type Component struct {
	// Name is the file name of the kubeconfig, without .kubeconfig, and of the certificate.
	Name, User string
	Groups     []string
}

// Issue creates a component's certificate and a self-contained kubeconfig, and returns the kubeconfig's path. Renew
// renews both; it must start after Issue.
func (p *PKI) Issue(c Component) (string, error) {
	if _, _, _, err := p.CA.Leaf(pki.Leaf{
		Name:          c.Name,
		CommonName:    c.User,
		Organizations: c.Groups,
		Usage:         pki.Client,
	}); err != nil {
		return "", err
	}
	path := p.File(c.Name + ".kubeconfig")
	if err := p.write(kubeconfig{path: path, leaf: c.Name, user: c.User}); err != nil {
		return "", err
	}
	p.issued = append(slices.DeleteFunc(p.issued, func(o Component) bool { return o.Name == c.Name }), c)
	return path, nil
}

// renewPeriod is the interval between checks of the certificates.
const renewPeriod = time.Hour

// Renew renews the certificates until ctx is done.
func (p *PKI) Renew(ctx context.Context) {
	tick := time.NewTicker(renewPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := p.issueLeaves(); err != nil {
			slog.Error("Certificates are not renewed", "error", err)
		}
	}
}

// kubeconfig describes the kubeconfig of one user.
type kubeconfig struct {
	path, leaf, user string
	// service is true for authn, authz, admission and registry. Their kubeconfigs refer to files, which the services
	// reload after a renewal. Other kubeconfigs contain the certificates.
	service bool
}

func (p *PKI) write(k kubeconfig) (err error) {
	cluster, user := map[string]any{"server": p.Gateway}, map[string]any{}
	set := func(in map[string]any, key, file string) {
		if k.service {
			in[key] = p.mountedPath(file)
			return
		}
		b, rerr := os.ReadFile(p.File(file))
		if rerr != nil {
			err = rerr
		}
		in[key+"-data"] = base64.StdEncoding.EncodeToString(b)
	}
	ca := "ca.crt"
	if k.service {
		ca, cluster["tls-server-name"] = "inner-ca.crt", identity.Gateway
		if p.ServicesGateway != "" {
			cluster["server"] = p.ServicesGateway
		}
	}
	set(cluster, "certificate-authority", ca)
	set(user, "client-certificate", k.leaf+".crt")
	set(user, "client-key", k.leaf+".key")
	if err != nil {
		return err
	}
	doc := map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": ClusterName,
		"clusters":        []any{map[string]any{"name": ClusterName, "cluster": cluster}},
		"users":           []any{map[string]any{"name": k.user, "user": user}},
		"contexts": []any{map[string]any{
			"name":    ClusterName,
			"context": map[string]any{"cluster": ClusterName, "user": k.user},
		}},
		"preferences": map[string]any{},
	}
	if !k.service {
		if err := keepChanges(doc, k.path); err != nil {
			return err
		}
	}
	text, err := yaml.Marshal(doc)
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(k.path); err == nil && bytes.Equal(old, text) {
		return os.Chmod(k.path, 0o600)
	}
	return pki.WriteFile(k.path, text, 0o600)
}

// ClusterName is the name of the cluster and of the context in kubeconfigs.
const ClusterName = "watershed"

// keepChanges keeps a user's changes of a kubeconfig: other clusters, users and contexts, the current context, and the
// namespace of the own context. It moves a file aside that is no kubeconfig.
func keepChanges(doc map[string]any, path string) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var old map[string]any
	if err := yaml.Unmarshal(text, &old); err != nil {
		aside := path + ".before-" + time.Now().UTC().Format("20060102T150405Z")
		slog.Warn("The kubeconfig is moved aside, because it cannot be read", "file", path, "to", aside, "error", err)
		return os.Rename(path, aside)
	}
	for _, kind := range []string{"clusters", "users", "contexts"} {
		own := doc[kind].([]any)[0].(map[string]any)
		entries, _ := old[kind].([]any)
		for _, e := range entries {
			entry, _ := e.(map[string]any)
			name, ok := entry["name"].(string)
			switch context, _ := entry["context"].(map[string]any); {
			case !ok:
			case name != own["name"]:
				doc[kind] = append(doc[kind].([]any), entry)
			case context["namespace"] != nil:
				own["context"].(map[string]any)["namespace"] = context["namespace"]
			}
		}
	}
	current, _ := old["current-context"].(string)
	if slices.ContainsFunc(doc["contexts"].([]any), func(c any) bool { return c.(map[string]any)["name"] == current }) {
		doc["current-context"] = current
	}
	return nil
}

// mountedPath returns the path of a file in the pods that read a service's kubeconfig.
func (p *PKI) mountedPath(file string) string {
	if p.MountPath != "" {
		return filepath.Join(p.MountPath, file)
	}
	return p.File(file)
}

// URL returns the URL of a gateway at a host and port.
func URL(host string, port int) string {
	return "https://" + net.JoinHostPort(host, strconv.Itoa(port))
}
