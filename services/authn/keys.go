package authn

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/util/keyutil"
	"k8s.io/kubernetes/pkg/serviceaccount"
	"k8s.io/kubernetes/pkg/serviceaccount/externaljwt/plugin"

	"watershed.dev/platform/reload"
)

// keyFiles holds the public keys of --service-account-key-file. The keys may change while they are in use.
type keyFiles struct {
	atomicValue[serviceaccount.PublicKeysGetter]

	mu        sync.Mutex
	listeners []serviceaccount.Listener
	// byFile has the keys of each file, in the order of the flags.
	byFile [][]any
}

// newKeyFiles reads the files now and after each change.
func newKeyFiles(ctx context.Context, paths []string, files *reload.Files) (*keyFiles, error) {
	k := &keyFiles{byFile: make([][]any, len(paths))}
	for i, p := range paths {
		if err := files.LoadAndWatch(ctx, "service-account-key-file", p, func(_ context.Context, data []byte) error {
			return k.reload(i, data)
		}); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// reload applies one file's keys and notifies the listeners.
func (k *keyFiles) reload(i int, data []byte) error {
	keys, err := keyutil.ParsePublicKeysPEM(data)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	all := slices.Clone(k.byFile)
	all[i] = keys
	getter, err := serviceaccount.StaticPublicKeysGetter(slices.Concat(all...))
	if err != nil {
		return err
	}
	k.byFile = all
	k.set(getter)
	for _, l := range k.listeners {
		l.Enqueue()
	}
	return nil
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

// externalKeys returns the keys of the signer at --service-account-signing-endpoint. It requests them periodically
// until ctx is done (KEP-740).
func externalKeys(ctx context.Context, issuers []string, endpoint string) (serviceaccount.PublicKeysGetter, error) {
	if len(issuers) == 0 {
		return nil, fmt.Errorf("--service-account-signing-endpoint %q: it needs --service-account-issuer; set that "+
			"too",
			endpoint)
	}
	_, keys, err := plugin.New(ctx, issuers[0], endpoint, keySyncTimeout, false)
	if err != nil {
		return nil, fmt.Errorf("--service-account-signing-endpoint %q: while setting up external-jwt-signer (is it "+
			"listening?): %w",
			endpoint, err)
	}
	return keys, nil
}

// keySyncTimeout bounds the request for the external signer's keys, as in kube-apiserver.
const keySyncTimeout = time.Minute

// issuerDocuments are the OpenID documents of the issuer. They name the gateway's address.
type issuerDocuments struct {
	issuer, jwks string
	keys         serviceaccount.PublicKeysGetter
}

// metadataFor returns the documents for a gateway's external address. They are built for each request, because requests
// are rare and the keys may have changed.
func (d *issuerDocuments) metadataFor(externalAddress string) (serviceaccount.OpenIDMetadataProvider, error) {
	return serviceaccount.NewOpenIDMetadataProvider(d.issuer, d.jwks, externalAddress, withoutListeners{d.keys})
}

// withoutListeners are keys that do not notify listeners of changes.
type withoutListeners struct {
	serviceaccount.PublicKeysGetter
}

// AddListener implements serviceaccount.PublicKeysGetter.
func (withoutListeners) AddListener(serviceaccount.Listener) {}
