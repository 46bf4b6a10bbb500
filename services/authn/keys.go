package authn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/client-go/util/keyutil"
	"k8s.io/kubernetes/pkg/serviceaccount"
	"k8s.io/kubernetes/pkg/serviceaccount/externaljwt/plugin"

	"watershed.dev/platform/reload"
)

// keyFiles are the public keys of --service-account-key-file, which may come and go while they are used.
type keyFiles struct {
	paths []string
	swapped[serviceaccount.PublicKeysGetter]

	mu        sync.Mutex
	listeners []serviceaccount.Listener
}

// newKeyFiles reads the files, and again when they change.
func newKeyFiles(paths []string, files *reload.Files) (*keyFiles, error) {
	k := &keyFiles{paths: paths}
	for _, p := range paths {
		if _, err := files.Read("service-account-key-file", p, func(context.Context, []byte) error {
			if err := k.read(); err != nil {
				return err
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			for _, l := range k.listeners {
				l.Enqueue()
			}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return k, k.read()
}

// AddListener implements serviceaccount.PublicKeysGetter.
func (k *keyFiles) AddListener(l serviceaccount.Listener) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listeners = append(k.listeners, l)
}

// GetCacheAgeMaxSeconds implements serviceaccount.PublicKeysGetter.
func (k *keyFiles) GetCacheAgeMaxSeconds() int { return k.get().GetCacheAgeMaxSeconds() }

// GetPublicKeys implements serviceaccount.PublicKeysGetter.
func (k *keyFiles) GetPublicKeys(ctx context.Context, id string) []serviceaccount.PublicKey {
	return k.get().GetPublicKeys(ctx, id)
}

func (k *keyFiles) read() error {
	var all []any
	for _, f := range k.paths {
		keys, err := keyutil.PublicKeysFromFile(f)
		if err != nil {
			return fmt.Errorf("--service-account-key-file %q: %w", f, err)
		}
		all = append(all, keys...)
	}
	getter, err := serviceaccount.StaticPublicKeysGetter(all)
	if err != nil {
		return fmt.Errorf("--service-account-key-file: %w", err)
	}
	k.set(getter)
	return nil
}

// externalKeys are those of the signer at --service-account-signing-endpoint, which is asked for them now and then for
// as long as ctx is not done (KEP-740).
func externalKeys(ctx context.Context, issuers []string, endpoint string) (serviceaccount.PublicKeysGetter, error) {
	if len(issuers) == 0 {
		return nil, errors.New("--service-account-signing-endpoint needs --service-account-issuer")
	}
	_, keys, err := plugin.New(ctx, issuers[0], endpoint, keySync, false)
	if err != nil {
		return nil, fmt.Errorf("--service-account-signing-endpoint %q: while setting up external-jwt-signer: %w",
			endpoint, err)
	}
	return keys, nil
}

// keySync bounds how long the external signer may take to tell its keys, as in kube-apiserver.
const keySync = time.Minute

// maxExternal bounds the addresses that the keys are shown under: there are as many as gateways are told of.
const maxExternal = 16

// documents are the issuer's OpenID documents, which name where the gateway is reached.
type documents struct {
	issuer, jwks string
	keys         serviceaccount.PublicKeysGetter

	mu         sync.Mutex
	byExternal map[string]serviceaccount.OpenIDMetadataProvider
}

// at is what is shown where the gateway is reached at an address; nil where there is nothing to show.
func (d *documents) at(external string) serviceaccount.OpenIDMetadataProvider {
	d.mu.Lock()
	defer d.mu.Unlock()
	if p, ok := d.byExternal[external]; ok {
		return p
	}
	if len(d.byExternal) >= maxExternal {
		return nil
	}
	p, err := serviceaccount.NewOpenIDMetadataProvider(d.issuer, d.jwks, external, d.keys)
	if err != nil {
		slog.Info("No OpenID documents for the service account issuer", "issuer", d.issuer, "reason", err)
		p = nil
	}
	if d.byExternal == nil {
		d.byExternal = map[string]serviceaccount.OpenIDMetadataProvider{}
	}
	d.byExternal[external] = p
	return p
}
