package storage

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig/controller"
	encryptionmetrics "k8s.io/apiserver/pkg/server/options/encryptionconfig/metrics"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
)

// encryption is how values are encrypted at rest, as kube-apiserver does it: either reads what the other has written.
type encryption struct {
	// transformers is nil where nothing is encrypted.
	transformers value.ResourceTransformers
	health       []healthz.HealthChecker
	// cancel closes the connections to KMS plugins; nil: nothing is encrypted.
	cancel context.CancelFunc
	// lastErr is what the last check said, nil where it was well.
	lastErr atomic.Pointer[error]
}

// openEncryption follows k8s.io/apiserver/pkg/server/options/etcd.go, maybeApplyResourceTransformers. The connections
// to KMS plugins end with ctx; id tells this process from others in metrics.
func openEncryption(ctx context.Context, o *Options, id string) (*encryption, error) {
	file, reload := o.EncryptionProviderConfig, o.EncryptionAutomaticReload
	switch {
	case file == "" && reload:
		return nil, errors.New("--encryption-provider-config-automatic-reload true: set it with " +
			"--encryption-provider-config alone")
	case file == "":
		return &encryption{}, nil
	}
	kmsCtx, cancel := context.WithCancel(ctx)
	config, err := encryptionconfig.LoadEncryptionConfig(kmsCtx, file, reload, id)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("--encryption-provider-config %q: %w", file, err)
	}
	encryptionmetrics.RecordEncryptionConfigLastConfigInfo(id, config.EncryptionFileContentHash)
	if !reload {
		return &encryption{
			transformers: encryptionconfig.StaticTransformers(config.Transformers),
			health:       config.HealthChecks,
			cancel:       cancel,
		}, nil
	}
	dynamic := encryptionconfig.NewDynamicTransformers(config.Transformers, config.HealthChecks[0], cancel,
		config.KMSCloseGracePeriod)
	reloader := controller.NewDynamicEncryptionConfiguration("encryption-provider-config", file, dynamic,
		config.EncryptionFileContentHash, id)
	go reloader.Run(ctx)
	return &encryption{
		transformers: dynamic,
		health:       []healthz.HealthChecker{dynamic},
		cancel:       cancel,
	}, nil
}

func (e *encryption) close() {
	if e.cancel != nil {
		e.cancel()
	}
}

// transformerFor is how a resource's values are encrypted.
func (e *encryption) transformerFor(gr schema.GroupResource) value.Transformer {
	if e.transformers == nil {
		return identity.NewEncryptCheckTransformer()
	}
	return e.transformers.TransformerForResource(gr)
}

// encryptionCheckPeriod is how often the providers are asked whether they can be used; their own caches bound how often a
// KMS plugin is.
const encryptionCheckPeriod = 5 * time.Second

// CheckEncryption asks the providers whether they can be used until ctx is done.
func (s *Storage) CheckEncryption(ctx context.Context) error {
	e := s.encryption
	if e.transformers == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	for {
		if err := e.check(ctx); err != nil {
			e.lastErr.Store(&err)
		} else {
			e.lastErr.Store(nil)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(encryptionCheckPeriod):
		}
	}
}

// EncryptionErr is why values cannot be encrypted or decrypted, as of when the providers were asked last, or nil.
func (s *Storage) EncryptionErr() error {
	if err := s.encryption.lastErr.Load(); err != nil {
		return *err
	}
	return nil
}

func (e *encryption) check(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range e.health {
		if err := h.Check(req); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", h.Name(), err))
		}
	}
	return errors.Join(errs...)
}
