package gateway

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/grpc"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// fakeSource is a registry with an error of etcd and an encryption error.
type fakeSource struct {
	registryv1.SourceClient
	calls      int
	etcd       error
	encryption string
}

func (s *fakeSource) Revision(context.Context, *registryv1.RevisionRequest,
	...grpc.CallOption) (*registryv1.RevisionResponse, error) {
	s.calls++
	if s.etcd != nil {
		return nil, s.etcd
	}
	return &registryv1.RevisionResponse{Revision: 1, EncryptionError: s.encryption}, nil
}

// The checks of etcd and of the KMS share a call to registry, and each reports only its own error.
func TestEtcdAndKMSChecksAreSeparate(t *testing.T) {
	away := errors.New("etcd is away")
	for name, c := range map[string]struct {
		source fakeSource
		kms    string
	}{
		"both are well":    {fakeSource{}, ""},
		"the KMS is away":  {fakeSource{encryption: "the KMS is away"}, "the KMS is away"},
		"etcd is away":     {fakeSource{etcd: away}, ""},
		"nothing is known": {fakeSource{etcd: away, encryption: "the KMS is away"}, ""},
	} {
		g := &Service{deps: Deps{Source: &c.source}}
		checks := g.checks()
		for range 2 {
			kms, etcd := checks["kms-providers"].get(t.Context()), checks["etcd"].get(t.Context())
			encryptionErr := ""
			if kms != nil {
				encryptionErr = kms.Error()
			}
			if !errors.Is(etcd, c.source.etcd) || encryptionErr != c.kms {
				t.Errorf("%s: etcd: %v, KMS: %v", name, etcd, kms)
			}
		}
		if c.source.calls != 1 {
			t.Errorf("%s: registry is called %d times", name, c.source.calls)
		}
	}
}
