package registry

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	certutil "k8s.io/client-go/util/cert"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/services/registry/controllers"
	"watershed.dev/services/registry/discovery"
)

// trustName is the ConfigMap in which each API server of a cluster publishes its client CA.
const trustName = "extension-apiserver-authentication"

const (
	// serverTimeout is longer than the leases of an API server that has stopped.
	serverTimeout = 40 * time.Second
	// serverCheckPeriod is the pause between two checks.
	serverCheckPeriod = 500 * time.Millisecond
)

// waitForSameCluster waits until checkSameCluster succeeds, because an API server that has stopped counts as live until
// its lease ends. It returns the error after serverTimeout. starting receives the reason of the wait.
func (s *Service) waitForSameCluster(ctx context.Context, starting func(reason error)) error {
	for deadline, warned := time.Now().Add(serverTimeout), false; ; warned = true {
		err := s.checkSameCluster(ctx)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		if !warned {
			slog.Warn("Waiting for the lease of another API server", "error", err)
			starting(fmt.Errorf("waiting for the lease of another API server: %w", err))
		}
		if err := lifecycle.Sleep(ctx, serverCheckPeriod); err != nil {
			return err
		}
	}
}

// checkSameCluster returns an error if API servers that serve now on the same etcd prefix have another client CA.
// Clients of either could not use the other, so the prefix is another cluster's, or a certificate is missing. A server
// that is alone may change its CA.
func (s *Service) checkSameCluster(ctx context.Context) error {
	file := s.config.Controllers.ClientCAFile
	if file == "" {
		return nil
	}
	others, err := s.liveServers(ctx)
	if err != nil || others == 0 {
		return err
	}
	trust, err := s.client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, trustName, metav1.GetOptions{})
	if err != nil { // it proves nothing
		slog.Warn("The client CA of the live API servers is unknown", "error", err)
		return nil
	}
	theirs, err := certutil.ParseCertsPEM([]byte(trust.Data["client-ca-file"]))
	if err != nil { // nothing is published
		return nil
	}
	ours, err := certutil.CertsFromFile(file)
	if err != nil {
		return fmt.Errorf("--client-ca-file %q: %w", file, err)
	}
	for _, c := range ours {
		if slices.ContainsFunc(theirs, func(o *x509.Certificate) bool { return bytes.Equal(o.Raw, c.Raw) }) {
			return nil
		}
	}
	return fmt.Errorf("--client-ca-file %q: a live API server on --etcd-prefix %q has another client CA (%s): add that "+
		"CA to the file, or choose another prefix", file, s.config.Storage.Prefix, theirs[0].Subject)
}

// liveServers returns the number of API servers with an unexpired lease: kube-apiservers and gateways.
func (s *Service) liveServers(ctx context.Context) (int64, error) {
	store := s.resources.Storage
	n := int64(0)
	for _, prefix := range []string{
		store.OwnKey(discovery.GatewaysPrefix),
		store.Prefix() + controllers.MasterLeases,
	} {
		resp, err := store.Client.Client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			return 0, err
		}
		n += resp.Count
	}
	return n, nil
}
